"""Whether an endpoint keeps thinking that comes back: facts that stand only in earlier thinking, and token counts."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from agent_runtime.conversation import Message, ToolCall, to_wire

Verdict: TypeAlias = Literal["preserved", "partly", "dropped", "unknown"]
FACTS: Final = 3
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Writes a note.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
_PLACES: Final = (
    "a turn that answered in text",
    "a turn that called a tool, before the last user message",
    "the turn after a tool's result",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What an endpoint made of one history."""

    prompt_tokens: int | None
    """None when it does not report them, or refused the history."""
    text: str
    refusal: str = ""
    """Its words, when it refused the history; "" when it answered."""


Ask: TypeAlias = Callable[[list[dict[str, Any]], list[dict[str, Any]], int], Awaitable[Asked]]
"""Sends messages and tools with an output limit."""


@dataclass(frozen=True, slots=True)
class PlaceResult:
    """One turn's thinking."""

    place: str
    tokens: int | None
    """Prompt tokens that appear with the thinking and vanish without it."""
    expected_tokens: int | None
    """What K3's tokenizer says; None without one."""
    recalled: bool
    """Whether the answer named the fact that stands only there."""

    @property
    def kept(self) -> bool | None:
        """Whether the endpoint puts this thinking into the prompt; None when it does not say."""
        return None if self.tokens is None else self.tokens > 0

    @property
    def exact(self) -> bool | None:
        """Whether all of it is there, to the token; None when that cannot be told."""
        return None if self.tokens is None or self.expected_tokens is None else self.tokens == self.expected_tokens


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about one endpoint."""

    places: tuple[PlaceResult, ...]
    additive: bool | None
    """Whether dropping all thinking saves what dropping each saves: no turn's thinking depends on another's."""
    other_key: bool | None
    """Whether thinking under `reasoning` counts as under `reasoning_content`."""
    missing_refused: bool
    """Whether a history without thinking is refused, so that its loss is noticed."""
    guessed: int
    """Facts named in the answer to the history without thinking: 0 unless numbers are guessed."""
    refusal: str
    """Words of a refusal of the complete history; "" when it was taken."""

    @property
    def verdict(self) -> Verdict:
        """`preserved` when the thinking of every turn reaches the model."""
        kept = [place.kept for place in self.places]
        if self.refusal or None in kept:
            return "unknown"
        if all(kept):
            return "preserved" if all(place.exact is not False for place in self.places) else "partly"
        return "partly" if any(kept) else "dropped"


async def verify(ask: Ask, *, count: Callable[[str], int] | None = None, answer_tokens: int = 4096) -> Report:
    """Probe an endpoint with six or seven requests.

    Token counts decide, so that the check works with any weights. What the model recalls is reported beside them.

    Args:
        ask: sends one history.
        count: tokens of a text in K3's tokenizer, to check to the token; None checks only that there are any.
        answer_tokens: output limit of the two requests whose answers are read.
    """
    facts = tuple(str(secrets.randbelow(900_000) + 100_000) for _ in range(FACTS))
    thoughts = [f"I choose {fact} for box {number}. I must not say it." for number, fact in enumerate(facts, 1)]
    full = await ask(_history(thoughts), [TOOL], answer_tokens)
    if full.refusal:
        return Report((), None, None, False, 0, full.refusal)
    none = await ask(_history([None] * FACTS), [TOOL], answer_tokens)
    without = [await ask(_history([*thoughts[:n], None, *thoughts[n + 1 :]]), [TOOL], 16) for n in range(FACTS)]
    other = await ask(_history(thoughts, key="reasoning"), [TOOL], 16)
    deltas = [_difference(full, one) for one in without]
    places = tuple(
        PlaceResult(place, delta, None if count is None else count(thought), fact in full.text)
        for place, delta, thought, fact in zip(_PLACES, deltas, thoughts, facts, strict=True)
    )
    known = [delta for delta in deltas if delta is not None]
    total = _difference(full, none)
    same = _difference(full, other)
    return Report(
        places=places,
        additive=None if total is None or len(known) < FACTS else total == sum(known),
        other_key=None if same is None else same == 0,
        missing_refused=bool(none.refusal),
        guessed=sum(fact in none.text for fact in facts),
        refusal="",
    )


def _difference(full: Asked, other: Asked) -> int | None:
    if full.prompt_tokens is None or other.prompt_tokens is None:
        return None
    return full.prompt_tokens - other.prompt_tokens


def _history(thoughts: Sequence[str | None], key: str = "reasoning_content") -> list[dict[str, Any]]:
    """A conversation of three turns that think; None leaves a turn's thinking out, key and all."""
    call = ToolCall("note_1", "note", '{"text": "box 2 is chosen"}')
    messages = [
        Message("user", "Choose a six-digit number for box 1 in your thinking. Do not say it. Answer: ready."),
        Message("assistant", "ready", thoughts[0]),
        Message("user", "The same for box 2, and write a note when you have it. Then the same for box 3."),
        Message("assistant", "", thoughts[1], (call,)),
        Message("tool", "noted", tool_call_id=call.id),
        Message("assistant", "ready", thoughts[2]),
        Message("user", "Which numbers are in the boxes 1, 2 and 3? Answer with the numbers only."),
    ]
    wire = [to_wire(message) for message in messages]
    for message in wire:
        thinking = message.pop("reasoning_content", None)
        if thinking:
            message[key] = thinking
    return wire
