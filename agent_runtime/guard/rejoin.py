"""Turns that a client stored as several assistant messages become one again, where the record says they were one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, TypeAlias

from agent_runtime.guard.fingerprint import Fingerprints, calls_value, turn_text
from agent_runtime.ledger.turns import KnownTurn, TurnIndex
from k3_sglang.chat.cache_marks import longest_ttl_s
from k3_sglang.chat.types import Message

Restored: TypeAlias = Literal["split", "text"]
Rejoined: TypeAlias = tuple[Sequence[Message], Sequence[int], Mapping[int, tuple[KnownTurn, Restored]]]


def rejoined(messages: Sequence[Message], index: TurnIndex, prints: Fingerprints) -> Rejoined:
    """The messages with runs of assistant messages joined that were one turn, their places, and what was restored.

    Left apart they teach K3, in context, to stop after prose. A turn of calls whose prose the client left out gets it
    back in the same way: its calls, by id and by value, say which turn it is. The last value has the recorded turns
    by place.
    """
    restored: dict[int, tuple[KnownTurn, Restored]] = {}
    places: Sequence[int] = range(len(messages))
    if any(a.role == b.role == "assistant" for a, b in pairwise(messages)):
        messages, places = _joined(messages, index, prints, restored)
    for number, message in enumerate(messages):
        if message.tool_calls and not message.content and places[number] not in restored:
            turn = _without_prose(message, index)
            if turn is not None:
                messages = [*messages[:number], replace(message, content=turn.message.content), *messages[number + 1 :]]
                restored[places[number]] = turn, "text"
    return messages, places, restored


def _joined(
    messages: Sequence[Message], index: TurnIndex, prints: Fingerprints, restored: dict[int, tuple[KnownTurn, Restored]]
) -> tuple[list[Message], list[int]]:
    joined: list[Message] = []
    places: list[int] = []
    first = 0
    while first < len(messages):
        end = first + 1
        while messages[first].role == "assistant" and end < len(messages) and messages[end].role == "assistant":
            end += 1
        whole, taken = messages[first], first + 1
        for last in range(end, first + 1, -1):
            candidate = _whole(messages[first:last])
            turn = _of_calls(candidate, index)
            if turn is not None and prints.visible(candidate) == turn.keys.visible:
                whole, taken = candidate, last
                restored[first] = turn, "split"
                break
        joined.append(whole)
        places.append(first)
        first = taken
    return joined, places


def _whole(messages: Sequence[Message]) -> Message:
    """Texts and calls one after the other; of thinking that is repeated, one copy; of marks the longest."""
    thoughts = dict.fromkeys(message.reasoning for message in messages if message.reasoning)
    return replace(
        messages[0],
        content="".join(turn_text(message.content) or "" for message in messages),
        reasoning="\n".join(thoughts) or None,
        tool_calls=tuple(call for message in messages for call in message.tool_calls),
        cache_ttl_s=longest_ttl_s(map(end_mark, messages)),
    )


def end_mark(turn: Message) -> int | None:
    """Seconds of the client's mark on a turn or a part of it: all mean its end, because its ids have no parts."""
    parts = turn.content if isinstance(turn.content, tuple) else ()
    return longest_ttl_s((turn.cache_ttl_s, *(part.cache_ttl_s for part in parts)))


def _without_prose(message: Message, index: TurnIndex) -> KnownTurn | None:
    """The recorded turn that a message of calls is, when it had text too."""
    turn = _of_calls(message, index)
    if turn is None or not (turn_text(turn.message.content) or "").strip():
        return None
    return turn if calls_value(message) == calls_value(turn.message) else None


def _of_calls(message: Message, index: TurnIndex) -> KnownTurn | None:
    """The recorded turn of the calls, when all of them come from one."""
    found = {turn.id if (turn := index.by_call(call.id)) is not None else None for call in message.tool_calls}
    if len(found) != 1:
        return None
    number = found.pop()
    return None if number is None else index.get(number)
