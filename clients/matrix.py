"""One row per client from what was recorded, and the rows as markdown and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from clients.catalog import Client
from clients.runner import Outcome
from clients.wire import OK, Step

YES, NO = "yes", "**no**"
COLUMNS = ("client", "version", "protocol", "connects", "streams", "tools", "thinking kept", "cached tokens", "SGLang")


@dataclass(frozen=True)
class Seen:
    """What happened between one client and one server."""

    connects: bool
    """The client took every answer and no request failed."""
    streams: bool
    tools: bool
    """A call was run by the client and its result accepted."""
    requests: int
    turns: dict[str, int]
    """Verdict of the gateway -> turns, summed over the requests."""
    cached_tokens: int
    prompt_tokens: int
    """Both over the requests with a history."""
    problem: str = ""
    output: str = ""
    hosts: list[str] = field(default_factory=list)
    """Other hosts that it asked for."""


def seen(outcome: Outcome, steps: Sequence[Step], hosts: list[str]) -> Seen:
    """Judge a run by what went over the wire; the driver's word is that its client took the answers."""
    made: set[str] = set()
    accepted = False
    turns: Counter[str] = Counter()
    cached_tokens = prompt_tokens = 0
    for index, step in enumerate(steps):
        done = step.status == OK and not step.error
        accepted |= done and bool(step.results & made)
        made |= step.calls
        turns.update(step.turns)
        if index and done:
            cached_tokens += step.cached_tokens
            prompt_tokens += step.prompt_tokens
    failed = next((step.error for step in steps if step.error), "")
    problem = failed or outcome.problem
    return Seen(
        connects=not problem and any(step.status == OK for step in steps),
        streams=any(step.streamed and step.complete for step in steps),
        tools=accepted,
        requests=len(steps),
        turns=dict(turns),
        cached_tokens=cached_tokens,
        prompt_tokens=prompt_tokens,
        problem=problem or ("" if steps else "it sent no request"),
        output=outcome.output if problem else "",
        hosts=hosts,
    )


@dataclass(frozen=True)
class Row:
    """A client before the gateway and, without it, before SGLang."""

    client: Client
    version: str
    gateway: Seen | None
    plain: Seen | None
    problem: str = ""
    """Why it could not be run at all."""

    def cells(self) -> list[str]:
        """The row of the markdown table."""
        client, seen = self.client, self.gateway
        head = [client.name, self.version, client.protocol]
        if seen is None:
            return [*head, f"not run: {self.problem}", "", "", "", "", ""]
        connects = YES if seen.connects else f"{NO}: {seen.problem}"
        streams = _yes(seen.streams) if client.streams else "not used"
        tokens = f"{seen.cached_tokens:,}"
        tokens += f" of {seen.prompt_tokens:,}" if seen.prompt_tokens else " (it asks for no usage)"
        return [*head, connects, streams, _yes(seen.tools), thinking(seen.turns), tokens, plain(self.plain)]

    def json(self) -> dict[str, Any]:
        """The row as plain values."""
        return {
            "client": self.client.name,
            "package": self.client.package,
            "version": self.version,
            "protocol": self.client.protocol,
            "gateway": self.gateway and asdict(self.gateway),
            "sglang": self.plain and asdict(self.plain),
            "problem": self.problem,
            "cells": self.cells(),
            "note": self.client.note,
        }


def _yes(value: bool) -> str:
    return YES if value else NO


def thinking(turns: dict[str, int]) -> str:
    """Turns of all histories by verdict: what the client kept, what the gateway put back, what is gone."""
    if not turns:
        return f"{NO}: no history was sent"
    words = {"exact": "exact", "repaired": "put back", "missing": "**missing**", "foreign": "**foreign**"}
    return ", ".join(f"{turns[name]} {word}" for name, word in words.items() if turns.get(name))


def plain(seen: Seen | None) -> str:
    """What the same client does without the gateway."""
    if seen is None:
        return "not run"
    if not seen.connects:
        return seen.problem
    return "works" if seen.tools else "answers; the model made no call"


def _notes(row: dict[str, Any]) -> str:
    """What the cells cannot say: the catalog's remark, and the hosts that the client asked for and did not get."""
    hosts = sorted({*(row["gateway"] or {}).get("hosts", ()), *(row["sglang"] or {}).get("hosts", ())})
    asked = [f"it asked for {', '.join(hosts)}, and works without"] if hosts else []
    return "; ".join([*([row["note"]] if row["note"] else []), *asked])


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of rows as :meth:`Row.json` gives them, then the notes of the clients that have one."""
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    lines += [" | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in row["cells"]) for row in rows]
    notes = [f"- {row['client']}: {note}" for row in rows if (note := _notes(row))]
    return "\n".join(f"| {line} |" for line in lines) + "\n" + ("\n" + "\n".join(notes) + "\n" if notes else "")
