"""What follows from a match: a verdict for each turn, and the history as it should have been sent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from agent_runtime.guard.fingerprint import turn_text
from agent_runtime.guard.matching import Matched, Step, thinking
from agent_runtime.guard.verdict import Check, Reason
from agent_runtime.ledger.turns import KnownTurn
from k3_sglang.chat.types import ChatRequest, Message

Mode: TypeAlias = Literal["repair", "strict", "off"]

DISTINCTIVE_CHARS = 16
"""Shorter thinking may well be the same in two turns."""
_FILLERS = frozenset(
    ["none", "null", "n/a", "na", "placeholder", "thinking", "reasoning", "empty", "omitted", "redacted"]
)


@dataclass(frozen=True, slots=True)
class Decision:
    """A turn's verdict and the message to put in its place; None where it stays as it was sent."""

    check: Check
    message: Message | None


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
    known = {thinking(step.turn.message): step.turn.id for step in matched.steps if step.turn is not None}
    decisions = [(step, _decide(step, request, known)) for step in matched.steps]
    checks = [decision.check for _, decision in decisions]
    checks += [Check(index, "missing", "dropped") for index in matched.dropped]
    checks.sort(key=lambda check: check.index)
    if mode == "off":
        checks = [_unrepaired(check) for check in checks]
        if any(step.restored is not None for step in matched.steps):
            return Repaired(request.messages, tuple(range(len(request.messages))), tuple(checks))
    pending = iter(decisions)
    placed: list[tuple[int, Message]] = []

    left_out = {step.index for step in matched.steps if step.restored == "dropped"}
    for index, message in matched.messages:
        if message.role == "assistant" or index in left_out:
            step, decision = next(pending)
            as_sent = decision.message is None or (mode == "off" and decision.check.verdict != "exact")
            placed.append((index, step.message if as_sent or decision.message is None else decision.message))
        if message.role != "assistant":
            placed.append((index, message))
    messages = tuple(message for _, message in placed)
    return Repaired(messages, tuple(index for index, _ in placed), tuple(checks))


def _decide(step: Step, request: ChatRequest, known: dict[str, int]) -> Decision:
    if step.turn is not None:
        return _of_known(step, step.turn, request, known)
    return _of_unknown(step, known)


def _of_known(step: Step, turn: KnownTurn, request: ChatRequest, known: dict[str, int]) -> Decision:
    message = replace(
        step.message,
        content=turn.message.content,
        reasoning=turn.message.reasoning,
        recorded_ids=turn.ids if turn.start == request.start else None,
        recorded_start=turn.start,
    )
    if not request.thinking and turn.start == "think":
        return Decision(Check(step.index, "missing", "thinking_off"), message)
    reason = step.restored or _wrong_with(step, turn, known)
    if reason is None:
        return Decision(Check(step.index, "exact"), message)
    return Decision(Check(step.index, "repaired", reason), message)


def _wrong_with(step: Step, turn: KnownTurn, known: dict[str, int]) -> Reason | None:
    """What is wrong with the thinking that was sent for a known turn."""
    sent, real = thinking(step.message), thinking(turn.message)
    if sent == real:
        return None
    if not sent:
        return "absent"
    if is_filler(sent):
        return "filler"
    if sent == (turn_text(step.message.content) or "").strip():
        return "copied"
    if known.get(sent, turn.id) != turn.id:
        return "duplicated"
    if real and real in sent:
        return "padded"
    return "truncated" if sent in real else "foreign"


def _of_unknown(step: Step, known: dict[str, int]) -> Decision:
    """A turn that is not in the record: what it says is kept, what is certainly not its thinking is taken out."""
    sent = thinking(step.message)
    unsure: Reason = "ambiguous" if step.ambiguous else "unknown"
    without = replace(step.message, reasoning=None)
    if step.edited is not None:
        if sent and not is_filler(sent):
            return Decision(Check(step.index, "foreign", "edited"), None)
        if thinking(step.edited.message):
            restored = replace(step.message, reasoning=step.edited.message.reasoning)
            return Decision(Check(step.index, "repaired", "edited"), restored)
    if not sent:
        return Decision(Check(step.index, "missing", unsure), None)
    if is_filler(sent):
        return Decision(Check(step.index, "missing", "filler"), without)
    if len(sent) >= DISTINCTIVE_CHARS and sent in known:
        return Decision(Check(step.index, "missing", "duplicated"), without)
    return Decision(Check(step.index, "foreign", unsure), None)


def _unrepaired(check: Check) -> Check:
    """The verdict when nothing may be changed."""
    if check.verdict != "repaired":
        return check
    absent = check.reason in ("absent", "filler", "dropped", "copied", "duplicated")
    return replace(check, verdict="missing" if absent else "foreign")


def is_filler(text: str) -> bool:
    """Whether a text is no thinking but something that clients write where they have none."""
    if not any(character.isalnum() for character in text):
        return True
    return len(text) <= DISTINCTIVE_CHARS and text.casefold().strip(" .()[]<>") in _FILLERS


def refused(checks: Sequence[Check]) -> list[Check]:
    """The checks that strict mode refuses: everything but what is as generated, or is left out by request."""
    return [check for check in checks if check.verdict != "exact" and check.reason != "thinking_off"]
