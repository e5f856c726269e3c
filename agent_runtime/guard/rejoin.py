"""Turns that a client stored as several assistant messages become one again, where the record says they were one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from agent_runtime.guard.fingerprint import Fingerprints, calls_value, turn_text
from agent_runtime.ledger.turns import KnownTurn, TurnIndex
from k3_sglang.chat.types import Message


@dataclass(frozen=True, slots=True)
class Entry:
    """A message at its place in the request.

    ``turn`` is the recorded turn that it was put together as, ``restored`` from what: messages, or calls without text.
    """

    index: int
    message: Message
    turn: KnownTurn | None = None
    restored: Literal["split", "text"] | None = None


def rejoined(messages: Sequence[Message], index: TurnIndex, prints: Fingerprints) -> list[Entry]:
    """The messages, runs of assistant messages joined that were one turn.

    Left apart they teach K3, in context, to stop after prose. A turn of calls whose prose the client left out gets it
    back in the same way: its calls, by id and by value, say which turn it is.
    """
    entries = [Entry(place, message) for place, message in enumerate(messages)]
    if any(a.role == b.role == "assistant" for a, b in pairwise(messages)):
        entries = list(_joined(entries, index, prints))
    return [_with_prose(entry, index) for entry in entries]


def _joined(entries: list[Entry], index: TurnIndex, prints: Fingerprints) -> Iterator[Entry]:
    run: list[Entry] = []
    for entry in entries:
        if entry.message.role == "assistant":
            run.append(entry)
            continue
        yield from _join_run(run, index, prints)
        run = []
        yield entry
    yield from _join_run(run, index, prints)


def _join_run(run: list[Entry], index: TurnIndex, prints: Fingerprints) -> Iterator[Entry]:
    first = 0
    while first < len(run):
        for last in range(len(run) - 1, first, -1):
            whole = _whole([entry.message for entry in run[first : last + 1]])
            turn = _of_calls(whole, index)
            if turn is not None and prints.visible(whole) == turn.keys.visible:
                yield Entry(run[first].index, whole, turn, "split")
                first = last + 1
                break
        else:
            yield run[first]
            first += 1


def _whole(messages: Sequence[Message]) -> Message:
    """Texts and calls one after the other; of thinking that is repeated, one copy."""
    thoughts = dict.fromkeys(message.reasoning for message in messages if message.reasoning)
    return replace(
        messages[0],
        content="".join(turn_text(message.content) or "" for message in messages),
        reasoning="\n".join(thoughts) or None,
        tool_calls=tuple(call for message in messages for call in message.tool_calls),
    )


def _with_prose(entry: Entry, index: TurnIndex) -> Entry:
    message = entry.message
    if entry.turn is not None or not message.tool_calls or turn_text(message.content) != "":
        return entry
    turn = _of_calls(message, index)
    if turn is None or not (turn_text(turn.message.content) or "").strip():
        return entry
    if calls_value(message) != calls_value(turn.message):
        return entry
    return Entry(entry.index, replace(message, content=turn.message.content), turn, "text")


def _of_calls(message: Message, index: TurnIndex) -> KnownTurn | None:
    """The recorded turn of the calls, when all of them come from one."""
    found = {turn.id if (turn := index.by_call(call.id)) is not None else None for call in message.tool_calls}
    if len(found) != 1:
        return None
    number = found.pop()
    return None if number is None else index.get(number)
