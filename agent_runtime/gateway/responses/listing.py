"""Items as they are shown: with ids and status, and a page of them at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.responses.items import Item
from k3_sglang.chat.request_fields import shown

_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs", "function_call_output": "fco"}
DEFAULT_LIMIT = 20
MAX_LIMIT = 100
_PARAMETERS = ("after", "limit", "order", "include")


def with_ids(items: Sequence[Item], token: str) -> list[Item]:
    """Items of a request, those without an id given one that is made from the response's random text."""
    named: list[Item] = []
    for index, item in enumerate(items):
        kind = item.get("type") or "message"
        made = f"{_PREFIXES[kind]}_{token}_{index:04x}"
        given = item.get("id")
        named.append({**item, "type": kind, "id": given if isinstance(given, str) and given else made})
    return named


def as_shown(item: Item) -> Item:
    """An item of the input as the API lists it: text in parts, with a status."""
    shown_item = {"status": "completed", **item}
    if item["type"] == "message" and isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        more: Item = {"annotations": []} if kind == "output_text" else {}
        shown_item["content"] = [{"type": kind, "text": item["content"], **more}]
    return shown_item


def page(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of the list of ``items``, which are in the order of the conversation. Raises ApiError for the query."""
    for name in query:
        if name.removesuffix("[]") not in _PARAMETERS:
            raise _refused(name, f"there is no parameter {shown(name)}; there are {', '.join(_PARAMETERS)}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise _refused("order", f'order={shown(order)}; allowed are "asc" and "desc"')
    text = query.get("limit", str(DEFAULT_LIMIT))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MAX_LIMIT)) else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise _refused("limit", f"limit={shown(text)}; allowed are 1 to {MAX_LIMIT}")
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if "after" in query:
        places = [place for place, item in enumerate(ordered) if item["id"] == query["after"]]
        if not places:
            raise _refused("after", f"no item of this response has the id {shown(query['after'])}")
        start = places[0] + 1
    data = [as_shown(item) for item in ordered[start : start + limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(ordered),
    }


def _refused(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)
