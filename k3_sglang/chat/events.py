"""What the output parser reports: incremental events and the finished turn."""

from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the think channel."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text of the response channel."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentBreak:
    """A structural token stood here: content before and after it is not one piece of text.

    What looks for words in the content, such as a stop string, must not look across.
    """


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call's name is known; `index` counts calls of the turn from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArgumentsDelta:
    """More of the call's arguments; the pieces of one call concatenate to its final JSON text."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is over; `complete` is False when it was cut or malformed and must not be executed."""

    index: int
    arguments: str
    complete: bool


Event: TypeAlias = ReasoningDelta | ContentDelta | ContentBreak | CallStart | CallArgumentsDelta | CallEnd


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a parsed turn; `arguments` is always a JSON object as text."""

    id: str
    name: str
    arguments: str
    complete: bool


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A parsed assistant turn.

    `finished` is False while the turn runs and when it was cut. `warnings` holds stable codes of the
    irregularities met, in order of first occurrence (keys of `WARNINGS`).
    """

    reasoning: str
    content: str
    calls: tuple[ParsedCall, ...]
    finished: bool
    warnings: tuple[str, ...]


WARNINGS = {
    "answer_without_channel": "the answer followed the think close without a response channel; it is content",
    "argument_not_json": "a value that is not JSON although its type says so became a string",
    "call_malformed": "a call with broken elements is reported as incomplete",
    "call_not_closed": "a call without its end is reported as incomplete",
    "call_without_name": "a call that names no tool was dropped",
    "calls_not_allowed": "the turn may hold no calls; its tools section was dropped",
    "channel_out_of_order": "a think or response channel came after its time; its text is appended",
    "control_token": "a control token without a place in the protocol ended the turn",
    "duplicate_argument": "an argument was given twice; the first value counts",
    "malformed_tag": "an unknown, misplaced or cut element was dropped with what it held",
    "output_after_end": "output after the end of the message was dropped",
    "repeated_open": "the open channel was opened again; ignored",
    "response_closed_in_think": "the answer was written into the think channel; it stays reasoning",
    "second_tools_section": "calls outside the first tools section were dropped",
    "separator_missing": "a tag without its separator was completed",
    "stray_marker": "a marker that delimits nothing was dropped; the text around it stays",
    "text_outside_channels": "text outside of channels was dropped",
    "think_not_closed": "the response or the tools followed without a think close; reasoning ends there",
}
"""Codes of `ParsedTurn.warnings` and what they mean."""


def merge_deltas(events: list[Event]) -> list[Event]:
    """Events with neighbouring deltas of one kind joined; linear time."""
    merged: list[Event] = []
    for _, run in groupby(events, key=_kind):
        first, *more = run
        if not more:
            merged.append(first)
        elif isinstance(first, ReasoningDelta | ContentDelta):
            texts = (event.text for event in (first, *more) if isinstance(event, type(first)))
            merged.append(type(first)("".join(texts)))
        elif isinstance(first, CallArgumentsDelta):
            pieces = (event.json for event in (first, *more) if isinstance(event, CallArgumentsDelta))
            merged.append(CallArgumentsDelta(first.index, "".join(pieces)))
        else:
            merged += (first, *more)
    return merged


def _kind(event: Event) -> tuple[type[Event], int]:
    """What must be equal for two neighbouring deltas to be one."""
    return type(event), event.index if isinstance(event, CallArgumentsDelta) else 0
