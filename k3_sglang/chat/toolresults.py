"""Which call each tool message answers: order, name and index of results in the prompt."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.types import Message, ToolCall


class NamedResult(NamedTuple):
    """The tool a result belongs to and its 1-based place among results since the last assistant turn."""

    tool: str
    position: int


def name_results(messages: Sequence[Message]) -> Iterator[tuple[int, Message, NamedResult | None]]:
    """Yield (original index, message, its result naming) in prompt order.

    A run of tool messages is sorted into the order of the preceding assistant turn's calls, by id, and takes
    the calls' names; with any id that matches no call the run keeps its order and names come from the messages
    or, failing that, from the calls by position. Raises ChatRequestError when no name can be found.
    """
    calls: tuple[ToolCall, ...] = ()
    answered = 0
    position = 0
    while position < len(messages):
        message = messages[position]
        if message.role != "tool":
            if message.role == "assistant":
                calls, answered = message.tool_calls, 0
            yield position, message, None
            position += 1
            continue
        if (
            len(calls) == 1
            and not answered
            and message.tool_call_id
            and message.tool_call_id == calls[0].id
            and (position + 1 == len(messages) or messages[position + 1].role != "tool")
        ):
            # The common case, told apart for long histories: the one result of the one call.
            answered = 1
            yield position, message, NamedResult(calls[0].name, 1)
            position += 1
            continue
        end = position
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        for index, result, matched in _ordered(messages, position, end, calls):
            answered += 1
            name = matched.name if matched else _fallback_name(index, result, calls, answered)
            yield index, result, NamedResult(name, answered)
        position = end


def _ordered(
    messages: Sequence[Message], begin: int, end: int, calls: Sequence[ToolCall]
) -> list[tuple[int, Message, ToolCall | None]]:
    """The run sorted by call, or as it stands (unmatched) when an id answers no call."""
    places = match_ids([messages[i].tool_call_id for i in range(begin, end)], calls)
    if None in places:
        return [(i, messages[i], None) for i in range(begin, end)]
    keyed = sorted((place, i) for place, i in zip(places, range(begin, end), strict=True) if place is not None)
    return [(i, messages[i], calls[place]) for place, i in keyed]


def match_ids(ids: Sequence[str | None], calls: Sequence[ToolCall]) -> list[int | None]:
    """Position of the call that each id answers; calls that share an id are answered in order."""
    places: dict[str, list[int]] = {}
    for place, call in enumerate(calls):
        if call.id:
            places.setdefault(call.id, []).append(place)
    used: dict[str, int] = {}
    matches: list[int | None] = []
    for wanted in ids:
        known = places.get(wanted or "")
        if known is None or wanted is None:
            matches.append(None)
            continue
        nth = used.get(wanted, 0)
        used[wanted] = nth + 1
        matches.append(known[min(nth, len(known) - 1)])
    return matches


def _fallback_name(index: int, message: Message, calls: Sequence[ToolCall], answered: int) -> str:
    if message.name is not None:
        return message.name
    if answered <= len(calls):
        return calls[answered - 1].name
    raise ChatRequestError(
        f"messages[{index}].tool_call_id",
        "tool_name_unresolvable",
        f"tool_call_id {message.tool_call_id!r} answers no call of the preceding assistant message; "
        "send the assistant message with that call before it, or give the tool's name in `name`",
    )
