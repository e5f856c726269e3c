"""What of a history stays when it is compressed: a pure function of the messages, that splits no turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from agent_runtime.compression.trigger import CompressionSettings
from agent_runtime.compression.users import keep_user_texts
from agent_runtime.conversation import Message

Size: TypeAlias = Callable[[str], int]
UnitKind: TypeAlias = Literal["system", "user", "turn", "synthetic"]


@dataclass(frozen=True, slots=True)
class Unit:
    """Messages `[start, end)` that stay or go together: one message, or an assistant turn with its results."""

    kind: UnitKind
    start: int
    end: int
    closed: bool = True
    """False while a call of the turn waits for its result."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to compress: which messages the summary is made of, and which of them the next window has."""

    seen: int
    """Messages `[0, seen)` are what the summary call is sent, unchanged, so that their prefix stays cached."""
    tail: int
    """Messages from here on go into the next window as they are; at most `seen`."""
    system: tuple[int, ...]
    """Positions before `tail` of system messages and declarations, kept as they are."""
    users: tuple[str, ...]
    """User messages from before `tail` to keep, in their order, the ones at the cut shortened."""
    elided_after: int
    """Position in `users` behind which messages were left out."""
    elided_tokens: int
    """Tokens of user messages left out by this plan."""


@dataclass(frozen=True, slots=True)
class NothingToCompress:
    """There is no turn that could be replaced by a summary."""

    reason: str


def units(messages: Sequence[Message], synthetic: Collection[int] = ()) -> list[Unit]:
    """The history as what may not be split, in order. `synthetic` are positions the runtime wrote itself."""
    found: list[Unit] = []
    waiting: set[str] = set()
    for index, message in enumerate(messages):
        if message.role == "tool":
            waiting.discard(str(message.tool_call_id))
            last = found[-1]
            found[-1] = Unit("turn", last.start, index + 1, not waiting)
        elif message.role == "assistant":
            waiting = {call.id for call in message.tool_calls}
            found.append(Unit("turn", index, index + 1, not waiting))
        elif index in synthetic:
            found.append(Unit("synthetic", index, index + 1))
        else:
            found.append(Unit("system" if message.role == "system" else "user", index, index + 1))
    return found


def make_plan(
    messages: Sequence[Message],
    synthetic: Collection[int],
    settings: CompressionSettings,
    size: Size,
    *,
    fraction: float = 1.0,
) -> Plan | NothingToCompress:
    """Plan a compression. Nothing is modified; the same arguments give the same plan.

    Args:
        messages: the window; a last turn whose calls wait for results is carried over and not summarised.
        synthetic: positions of the last window's summary and notes: the new summary takes their place.
        size: tokens of a text.
        fraction: part of the text to summarise, from the start; what is behind it is carried over. Below 1 after the
            endpoint said that the whole does not fit.
    """
    closed = [unit for unit in units(messages, synthetic) if unit.closed]
    seen = closed[-1].end if closed else 0
    if fraction < 1.0:
        seen = _cut(messages, closed, fraction, size)
    turns = [unit for unit in closed if unit.kind == "turn" and unit.end <= seen]
    tail = seen
    if fraction == 1.0 and settings.keep_turns:
        tail = turns[-settings.keep_turns].start if len(turns) >= settings.keep_turns else 0
    if not any(unit.end <= tail for unit in turns):
        what = "no complete turn" if not turns else f"only the {settings.keep_turns} turns that are kept"
        return NothingToCompress(f"{what} in {len(messages)} messages")
    before = [unit for unit in closed if unit.end <= tail]
    texts = [str(messages[unit.start].content) for unit in before if unit.kind == "user"]
    kept = keep_user_texts(texts, settings.user_head_tokens, settings.user_tokens, size)
    return Plan(
        seen=seen,
        tail=tail,
        system=tuple(unit.start for unit in before if unit.kind == "system"),
        users=kept.texts,
        elided_after=kept.elided_after,
        elided_tokens=kept.elided_tokens,
    )


def _cut(messages: Sequence[Message], closed: Sequence[Unit], fraction: float, size: Size) -> int:
    """The last boundary between units within a part of the text."""
    sizes = [sum(_message_size(message, size) for message in messages[unit.start : unit.end]) for unit in closed]
    room, seen = fraction * sum(sizes), 0
    for unit, tokens in zip(closed, sizes, strict=True):
        room -= tokens
        if room < 0:
            break
        seen = unit.end
    return seen


def _message_size(message: Message, size: Size) -> int:
    texts = [str(message.content or ""), message.reasoning or "", *(call.arguments for call in message.tool_calls)]
    return sum(size(text) for text in texts if text)
