"""Where the content of steps is found: in the guard's memory while it is there, else in the ledger, if there is one."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from agent_runtime.errors import LedgerError
from agent_runtime.guard.prompt import HistoryGuard
from agent_runtime.inspector.facts import StepFacts
from agent_runtime.ledger.reading import LedgerReader
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.types import Channel, Message

ReadBody = Callable[[str, dict[str, Any]], dict[str, Any]]
"""The body of a request in some form to that of a chat completion; ValueError for a form it does not read."""


@dataclass(frozen=True, slots=True)
class Output:
    """What one turn consists of. ``ids`` are empty where the server gave none."""

    turn: int
    choice: int
    ids: Sequence[int]
    start: Channel
    message: Message


@dataclass(frozen=True, slots=True)
class StepContent:
    """A step's prompt and outputs; ``prompt_ids`` None where they are not to be had, and ``missing`` says why."""

    prompt_ids: Sequence[int] | None
    outputs: Sequence[Output]
    missing: str = ""


class Sent(NamedTuple):
    """A message as its client sent it, as JSON; without one ``missing`` says why."""

    message: str | None
    missing: str = ""


class Contents:
    """The content of steps. Its methods read files and may run long: call them on a thread."""

    def __init__(self, guard: HistoryGuard, ledger: Path | None, read_body: ReadBody, *, has_ids: bool) -> None:
        self._guard = guard
        self._ledger = ledger
        self._read_body = read_body
        self._has_ids = has_ids

    def of(self, step: StepFacts) -> StepContent:
        """Prompt and outputs of a step."""
        if self._has_ids:
            for turn in step.turns:
                tip = self._guard.tips.peek(turn.id)
                if tip is not None:
                    ids = [token for part in tip.parts for token in part.ids]
                    return StepContent(ids, self._known(step))
        if self._ledger is not None:
            return self._from_ledger(step, self._ledger)
        if not self._has_ids:
            return StepContent(None, self._known(step), "The server that answered gave no token ids.")
        reason = "The prompt is no longer in memory; with the setting ledger every prompt is kept."
        return StepContent(None, self._known(step), reason if step.turns else "A step without an answer is not kept.")

    def came_back(self, step: StepFacts) -> Sent:
        """The assistant message of a step's request that is the turn it goes on from."""
        if self._ledger is None or step.came_back is None:
            return Sent(None, "What clients send is kept with a ledger only (setting ledger).")
        if step.came_back.reason == "dropped":
            return Sent(None, "The client left this turn out; it was put back before the message that is named.")
        try:
            with LedgerReader(self._ledger) as reader:
                body = self._read_body(step.form, json.loads(reader.body(step.id)))
            messages = cast("list[Any]", body["messages"])
            return Sent(json.dumps(messages[step.came_back.at], ensure_ascii=False, indent=2))
        except (LedgerError, ChatRequestError, ValueError, LookupError) as error:
            return Sent(None, f"What the client sent cannot be shown: {error}.")

    def _known(self, step: StepFacts) -> list[Output]:
        found: list[Output] = []
        for turn in step.turns:
            known = self._guard.index.get(turn.id)
            if known is not None:
                tip = self._guard.tips.peek(turn.id) if self._has_ids else None
                ids = tip.output if tip is not None else known.ids or ()
                found.append(Output(turn.id, turn.choice, ids, known.start, known.message))
        return found

    def _from_ledger(self, step: StepFacts, path: Path) -> StepContent:
        try:
            with LedgerReader(path) as reader:
                prompt = reader.prompt_ids(step.id) if self._has_ids else None
                outputs = [
                    Output(record.turn.id, record.choice, record.ids, record.turn.start, record.turn.message)
                    for record in reader.turns_of(step.id)
                ]
        except LedgerError as error:
            return StepContent(None, self._known(step), str(error))
        return StepContent(prompt, outputs, "" if self._has_ids else "The server that answered gave no token ids.")
