"""What follows from a match: a verdict for each turn, and the history as it should have been sent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from agent_runtime.guard.fingerprint import turn_text
from agent_runtime.guard.history import Matched, Step, thinking
from agent_runtime.guard.rejoin import end_mark
from agent_runtime.guard.verdict import Check, Reason
from agent_runtime.ledger.turns import KnownTurn
from k3_sglang.chat.types import ChatRequest, Message, ToolCall

Mode: TypeAlias = Literal["repair", "strict", "off"]

DISTINCTIVE_CHARS = 16
"""Shorter thinking may well be the same in two turns."""
INTERRUPTED_END = "[interrupted]"
"""How a client ends the text of a turn that broke off on its way, our agent loop for one."""
_FILLERS = frozenset(
    ["none", "null", "n/a", "na", "placeholder", "thinking", "reasoning", "empty", "omitted", "redacted"]
)


@dataclass(frozen=True, slots=True)
class Repaired:
    """The history to encode, where each of its messages was received, and the verdicts.

    A turn that was put back has the index of the message it stands before.
    """

    messages: tuple[Message, ...]
    indices: tuple[int, ...]
    checks: tuple[Check, ...]


def repair(request: ChatRequest, matched: Matched, mode: Mode) -> Repaired:
    """Apply a match to a history; with ``off`` only turns that came back as they were are replayed by their ids."""
    known = _Thoughts(matched)
    decisions = [_decide(step, request, known) for step in matched.steps]
    checks = [check for check, _ in decisions]
    if matched.dropped:
        checks += [Check(place, "missing", "dropped") for place in matched.dropped]
        checks.sort(key=lambda check: check.at)
    if mode == "off":
        if any(step.restored is not None for step in matched.steps):
            places = tuple(range(len(request.messages)))
            return Repaired(request.messages, places, tuple(map(_unrepaired, checks)))
        decisions = [
            (check, message if check.verdict == "exact" else step.message)
            for step, (check, message) in zip(matched.steps, decisions, strict=True)
        ]
        checks = [_unrepaired(check) for check in checks]
    pending = iter(decisions)
    left_out = {step.index for step in matched.steps if step.restored == "dropped"}
    messages: list[Message] = []
    indices: list[int] = []
    for index, message in zip(matched.indices, matched.messages, strict=True):
        is_turn = message.role == "assistant"
        if is_turn or index in left_out:
            messages.append(next(pending)[1])
            indices.append(index)
        if not is_turn:
            messages.append(message)
            indices.append(index)
    return Repaired(tuple(messages), tuple(indices), tuple(checks))


class _Thoughts:
    """The thinking of the known turns of a history, put in a table when it is first asked for."""

    def __init__(self, matched: Matched) -> None:
        self._matched = matched

    @cached_property
    def turns(self) -> dict[str, int]:
        """Turn by its thinking."""
        return {thinking(step.turn.message): step.turn.id for step in self._matched.steps if step.turn is not None}


def _decide(step: Step, request: ChatRequest, known: _Thoughts) -> tuple[Check, Message]:
    """The verdict on a turn and the message to put in its place."""
    turn = step.turn
    if turn is None:
        return _of_unknown(step, known)
    message = _as_recorded(step.message, turn) if turn.start == request.start else _as_text(step.message, turn)
    if not request.thinking and turn.start == "think":
        return Check(step.index, "missing", "thinking_off"), message
    reason = step.restored or _wrong_with(step, turn, known)
    if reason is None:
        return Check(step.index, "exact"), message
    return Check(step.index, "repaired", reason), message


def _as_recorded(sent: Message, turn: KnownTurn) -> Message:
    """The turn by its ids, with the call ids that the client's results answer and the client's marks."""
    recorded = turn.replayed
    calls = sent.tool_calls
    is_plain = sent.cache_ttl_s is None and not isinstance(sent.content, tuple)
    if is_plain and len(calls) == len(recorded.tool_calls) and all(map(_same_id, calls, recorded.tool_calls)):
        return recorded
    return replace(recorded, tool_calls=calls, cache_ttl_s=end_mark(sent))


def _as_text(sent: Message, turn: KnownTurn) -> Message:
    return replace(turn.message, tool_calls=sent.tool_calls, cache_ttl_s=end_mark(sent))


def _same_id(first: ToolCall, second: ToolCall) -> bool:
    return first.id == second.id


def _wrong_with(step: Step, turn: KnownTurn, known: _Thoughts) -> Reason | None:
    """What is wrong with the thinking that was sent for a known turn. The turn's signature alone stands for it."""
    sent, real = thinking(step.message), thinking(turn.message)
    if sent == real:
        return None
    if not sent:
        return None if step.message.signature == turn.signature != "" else "absent"
    if is_filler(sent):
        return "filler"
    if sent == (turn_text(step.message.content) or "").strip():
        return "copied"
    if known.turns.get(sent, turn.id) != turn.id:
        return "duplicated"
    if real and real in sent:
        return "padded"
    return "truncated" if sent in real else "foreign"


def _of_unknown(step: Step, known: _Thoughts) -> tuple[Check, Message]:
    """A turn that is not in the record: what it says is kept, what is certainly not its thinking is taken out."""
    sent = thinking(step.message)
    unsure: Reason = "ambiguous" if step.ambiguous else "unknown"
    if _is_interrupted(step.message):
        unsure = "interrupted"
    without = replace(step.message, reasoning=None)
    if step.edited is not None:
        if sent and not is_filler(sent):
            return Check(step.index, "foreign", "edited"), step.message
        if thinking(step.edited.message):
            restored = replace(step.message, reasoning=step.edited.message.reasoning)
            return Check(step.index, "repaired", "edited"), restored
    if not sent:
        return Check(step.index, "missing", unsure), step.message
    if is_filler(sent):
        return Check(step.index, "missing", "filler"), without
    if len(sent) >= DISTINCTIVE_CHARS and sent in known.turns:
        return Check(step.index, "missing", "duplicated"), without
    return Check(step.index, "foreign", unsure), step.message


def _is_interrupted(message: Message) -> bool:
    """Whether a client says that this turn broke off. One with calls did not: they are never run then."""
    return not message.tool_calls and (turn_text(message.content) or "").rstrip().endswith(INTERRUPTED_END)


def _unrepaired(check: Check) -> Check:
    """The verdict when nothing may be changed."""
    if check.verdict != "repaired":
        return check
    absent = check.reason in ("absent", "filler", "dropped", "copied", "duplicated")
    return check._replace(verdict="missing" if absent else "foreign")


def is_filler(text: str) -> bool:
    """Whether a text is no thinking but something that clients write where they have none."""
    if not any(character.isalnum() for character in text):
        return True
    return len(text) <= DISTINCTIVE_CHARS and text.casefold().strip(" .()[]<>") in _FILLERS


def refused(checks: Sequence[Check]) -> list[Check]:
    """The checks that strict mode refuses: all but what is as generated, is left out by request, broke off on its way
    (nothing whole is on record), or was perhaps meant to be left out (a client that compacts its history drops turns).
    """
    return [
        check
        for check in checks
        if check.verdict != "exact"
        and check.reason not in ("thinking_off", "interrupted")
        and (check.verdict, check.reason) != ("missing", "dropped")
    ]
