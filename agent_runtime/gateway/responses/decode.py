"""A Responses request to the chat completion it means: pure, what is stored is handed in."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.responses.blame import Blame
from agent_runtime.gateway.responses.fields import PASSED_ON, ResponseFields, parse_fields
from agent_runtime.gateway.responses.items import History, Item, input_items, item_type
from agent_runtime.gateway.responses.tools import chat_effort, chat_response_format, chat_tool_choice, chat_tools
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.request_fields import refuse, required_object, shown, wrong_type

FindItem: TypeAlias = Callable[[str], Item | None]
"""A stored item by its id."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A request: its own fields and items (references resolved), the chat body it means, and whose fault is what."""

    fields: ResponseFields
    items: tuple[Item, ...]
    chat: dict[str, Any]
    blame: Blame


def decode(body: Mapping[str, Any], before: Sequence[Item] = (), find_item: FindItem = lambda _: None) -> Decoded:
    """The chat body has the instructions, then ``before`` (the items of the response that this one continues), then
    the input. Raises ApiError.
    """
    fields = parse_fields(body)
    with _refusals():
        if body.get("input") is None:
            wrong_type("input", body.get("input"), "a string or a list of items")
        items = [_resolved(item, at, find_item) for at, item in enumerate(input_items(body["input"]))]
        if not items and not before:
            refuse("input", "empty_messages", "the list is empty; send at least one item")
        messages, places = _messages(fields.instructions, before, items)
        chat = {key: body[key] for key in PASSED_ON if body.get(key) is not None}
        chat |= _prompt_fields(body)
    chat["messages"] = messages
    if fields.max_output_tokens is not None:
        chat["max_completion_tokens"] = fields.max_output_tokens
    return Decoded(fields, tuple(items), chat, Blame(tuple(places), len(before)))


def _prompt_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    tools = chat_tools(body["tools"]) if body.get("tools") is not None else []
    if tools:
        chat["tools"] = tools
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = chat_tool_choice(body["tool_choice"], tools)
    if body.get("text") is not None and (form := chat_response_format(body["text"])) is not None:
        chat["response_format"] = form
    if body.get("reasoning") is not None and (effort := chat_effort(body["reasoning"])) is not None:
        chat["reasoning_effort"] = effort
    return chat


def _resolved(item: Item, at: int, find_item: FindItem) -> Item:
    param = f"input[{at}]"
    item = required_object(item, param)
    is_reference = item.get("type") == "item_reference" or (set(item) == {"id"})
    if not is_reference:
        item_type(item, param)
        return item
    name = item.get("id")
    found = find_item(name) if isinstance(name, str) else None
    if found is None:
        raise ApiError(
            404,
            f"{param}.id: no item {shown(name)} is stored here (items of responses with store=false never are, old "
            "ones are dropped). Send the item itself.",
            code="item_not_found",
            param=f"{param}.id",
        )
    return found


def _messages(
    instructions: str | None, before: Sequence[Item], items: Sequence[Item]
) -> tuple[list[dict[str, Any]], list[int | None]]:
    history = History()
    for index, item in enumerate((*before, *items)):
        own = index - len(before)
        history.add(item, index, f"input[{own}]" if own >= 0 else "previous_response_id")
    if not history.messages:
        refuse("input", "empty_messages", "none of its items says anything; send at least one message")
    if not instructions:
        return history.messages, list(history.items)
    return [{"role": "system", "content": instructions}, *history.messages], [None, *history.items]


@contextmanager
def _refusals() -> Generator[None, None, None]:
    try:
        yield
    except ChatRequestError as error:
        raise ApiError(400, str(error), code=error.code, param=error.param) from error
