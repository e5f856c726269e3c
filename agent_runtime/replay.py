"""Every request of a session again from its run log, without a model, and whether each has the very same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agent_runtime.history import request_digest
from agent_runtime.runstore import Entry, RunLogError


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """One request as the log gives it again."""

    number: int
    purpose: str
    messages: list[dict[str, Any]]
    """Wire messages, in order."""
    tools: list[dict[str, Any]]
    options: dict[str, Any]
    exact: bool
    """Whether its bytes are those that were sent."""


def replay(entries: Sequence[Entry]) -> Iterator[ReplayedRequest]:
    """The requests in the order they were sent.

    Raises:
        RunLogError: the log does not begin with a session.
    """
    if not entries or entries[0]["kind"] != "open":
        raise RunLogError("the run log does not begin with a session; was it ever written to?")
    tools: list[dict[str, Any]] = entries[0]["tools"]
    messages: list[dict[str, Any]] = []
    number = 0
    for entry in entries:
        if entry["kind"] in ("message", "run"):
            messages.append(entry["message"])
        elif entry["kind"] == "window":
            messages = list(entry["messages"])
        elif entry["kind"] == "request":
            number += 1
            sent = [*messages[: entry["messages"]], *entry["added"]]
            exact = request_digest(sent, tools, entry["options"]) == entry["digest"]
            yield ReplayedRequest(number, entry["purpose"], sent, tools, entry["options"], exact)
