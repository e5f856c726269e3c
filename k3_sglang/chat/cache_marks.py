"""`cache_control` of messages, parts and tools: where a client says that later requests will go on."""

from collections.abc import Iterable, Mapping
from typing import Any

from k3_sglang.chat.json_types import is_list, is_object
from k3_sglang.chat.request_fields import refuse, required_object, shown
from k3_sglang.chat.types import JSONObject

MARK = "cache_control"
TTL_S = {"5m": 300, "1h": 3600}
"""Anthropic's words for how long a marked beginning is kept; without one it is five minutes."""


def cache_ttl_s(owner: Mapping[str, Any], param: str) -> int | None:
    """Seconds of the mark on a message, part or tool; None without one. Raises ChatRequestError for another shape."""
    mark = owner.get(MARK)
    if mark is None:
        return None
    ttl = mark.get("ttl") or "5m" if is_object(mark) else None
    known = is_object(mark) and mark.get("type") == "ephemeral" and set(mark) <= {"type", "ttl"}
    if not known or not isinstance(ttl, str) or ttl not in TTL_S:
        refuse(
            f"{param}.{MARK}",
            "invalid_cache_control",
            f'got {shown(mark)}; allowed is {{"type": "ephemeral"}} with "ttl" "5m" (the default) or "1h"',
        )
    return TTL_S[ttl]


def longest_ttl_s(ttls: Iterable[int | None]) -> int | None:
    """The longest of some marks, None when there is none."""
    return max((ttl for ttl in ttls if ttl is not None), default=None)


def unmarked_tools(value: Any, param: str) -> tuple[Any, int | None]:
    """A list of tools without their marks, which are no part of what the model is told, and the longest of these.

    A mark stands on the tool or inside its `function`. What is no list of objects is left to `parse_tools`.
    """
    if not is_list(value) or not any(_is_marked(tool) for tool in value):
        return value, None
    tools: list[Any] = []
    ttls: list[int | None] = []
    for position, tool in enumerate(value):
        if not _is_marked(tool):
            tools.append(tool)
            continue
        place = f"{param}[{position}]"
        tool = required_object(tool, place)
        ttls.append(cache_ttl_s(tool, place))
        plain: JSONObject = {key: item for key, item in tool.items() if key != MARK}
        function = tool.get("function")
        if is_object(function):
            ttls.append(cache_ttl_s(function, f"{place}.function"))
            plain["function"] = {key: item for key, item in function.items() if key != MARK}
        tools.append(plain)
    return tools, longest_ttl_s(ttls)


def _is_marked(tool: Any) -> bool:
    if not is_object(tool):
        return False
    function = tool.get("function")
    return MARK in tool or (is_object(function) and MARK in function)
