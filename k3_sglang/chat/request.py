"""OpenAI-shaped request bodies to ChatRequest; refuses what the prompt cannot say."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from k3_sglang.chat.cache_marks import longest_ttl_s, unmarked_tools
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.json_types import is_list, is_object
from k3_sglang.chat.request_fields import refuse, shown, wrong_type
from k3_sglang.chat.request_messages import MessageParser
from k3_sglang.chat.request_tools import check_unique, parse_response_format, parse_tool_choice, parse_tools
from k3_sglang.chat.toolresults import match_ids
from k3_sglang.chat.types import ChatRequest, Effort, ImageResolver, JSONObject, Message, ToolCall

__all__ = ["PROMPT_FIELDS", "ChatRequestError", "parse_request"]

PROMPT_FIELDS: frozenset[str] = frozenset(
    (
        "messages",
        "tools",
        "tool_choice",
        "response_format",
        "reasoning_effort",
        "thinking",
        "parallel_tool_calls",
    )
)
"""Top-level keys that `parse_request` reads; whoever serves the request refuses or handles all others."""

_TIERS: dict[str, Effort] = {"low": "low", "high": "high", "max": "max"}
# K3 was trained on three tiers; other vendors' words go to the nearest one, never silently to the strongest.
_NEAREST_TIER: dict[str, Effort] = {"minimal": "low", "medium": "high", "xhigh": "max"}
_EFFORTS = "low, high, max (also minimal = low, medium = high, xhigh = max, none = thinking off)"


def parse_request(
    body: Mapping[str, Any], *, lenient: bool = False, images: ImageResolver | None = None
) -> ChatRequest:
    """Read the prompt-shaping fields of a chat completion body; `body` is not changed.

    Raises ChatRequestError naming the field. With `lenient` the rules are those of K3's released encoder:
    messages of unknown role (`developer` included) and entries that are not objects are skipped, effort has
    its three words only, any tool list is rendered, and `add_generation_prompt` and `image_sizes` are read.
    `images` finds the sizes of images that have none there; without it such images are refused.
    """
    strict = not lenient
    messages = _messages(body, images, strict=strict)
    declared_tools, tools_ttl_s = unmarked_tools(body.get("tools"), "tools") if strict else (body.get("tools"), None)
    tools = parse_tools(declared_tools, "tools", strict=strict)
    if strict:
        _check_all_tools(tools, messages)
    declared = (*tools, *(tool for _, message in messages for tool in message.tools or ()))
    thinking, effort = _thinking(body, strict=strict)
    final = _merge_split_turns(_name_matched_results(messages)) if strict else [m for _, m in messages]
    return ChatRequest(
        messages=tuple(final),
        tools=tools,
        tool_choice=parse_tool_choice(body.get("tool_choice"), declared, strict=strict),
        response_format=parse_response_format(body.get("response_format"), strict=strict),
        effort=effort,
        thinking=thinking,
        parallel_tool_calls=_flag(body, "parallel_tool_calls"),
        add_generation_prompt=strict or _flag(body, "add_generation_prompt"),
        tools_cache_ttl_s=tools_ttl_s,
    )


def _messages(body: Mapping[str, Any], images: ImageResolver | None, *, strict: bool) -> list[tuple[int, Message]]:
    """Messages with their positions in the body."""
    value = body.get("messages")
    if not is_list(value):
        wrong_type("messages", value, "a list of messages")
    if strict and not value:
        refuse("messages", "empty_messages", "the list is empty; send at least one message")
    parser = MessageParser(None if strict else body.get("image_sizes"), images, strict=strict)
    parsed = [(index, parser.parse(entry, index)) for index, entry in enumerate(value)]
    parser.finish()
    return [(index, message) for index, message in parsed if message is not None]


def _check_all_tools(tools: tuple[JSONObject, ...], messages: list[tuple[int, Message]]) -> None:
    declared: list[JSONObject] = list(tools)
    params = [f"tools[{i}]" for i in range(len(tools))]
    for index, message in messages:
        for position, tool in enumerate(message.tools or ()):
            declared.append(tool)
            params.append(f"messages[{index}].tools[{position}]")
    check_unique(declared, params)


def _thinking(body: Mapping[str, Any], *, strict: bool) -> tuple[bool, Effort | None]:
    """Whether K3 thinks, and its effort; `thinking.effort` wins over `reasoning_effort`."""
    thinking = body.get("thinking")
    effort: Any = body.get("reasoning_effort")
    param = "reasoning_effort"
    if is_object(thinking) and strict:
        enabled = _thinking_object(thinking)
        if thinking.get("effort") is not None:
            effort, param = thinking["effort"], "thinking.effort"
    elif thinking is None or isinstance(thinking, bool):
        enabled = thinking is not False
    else:
        wrong_type("thinking", thinking, 'true, false or {"type": "enabled" | "disabled"}')
    if strict and effort == "none":
        return False, None
    tier = _tier(effort, param, strict=strict)
    return enabled, tier if enabled else None


def _thinking_object(thinking: Mapping[str, Any]) -> bool:
    kind = thinking.get("type", "enabled")
    if kind not in ("enabled", "disabled"):
        refuse("thinking.type", "invalid_thinking", f'got {shown(kind)}; allowed are "enabled" and "disabled"')
    keep = thinking.get("keep")
    if keep not in (None, "all"):
        refuse("thinking.keep", "invalid_thinking", f'got {shown(keep)}; K3 always keeps all thinking ("all")')
    unknown = sorted(set(thinking) - {"type", "keep", "effort"})
    if unknown:
        refuse(f"thinking.{unknown[0]}", "unknown_field", "allowed are type, effort and keep")
    return kind == "enabled"


def _tier(effort: Any, param: str, *, strict: bool) -> Effort:
    if effort is None:
        return "max"
    if isinstance(effort, str):
        tier = _TIERS.get(effort) or (_NEAREST_TIER.get(effort) if strict else None)
        if tier is not None:
            return tier
    refuse(param, "unsupported_reasoning_effort", f"got {shown(effort)}; allowed are {_EFFORTS}")


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        wrong_type(key, value, "a boolean")
    return value is not False


def _name_matched_results(messages: list[tuple[int, Message]]) -> list[Message]:
    """Give every result the name of the call it answers; refuse one that answers none and names no tool.

    The reference names a run of results by position as soon as one id is unknown, which would label results
    with other tools' names; here that cannot happen.
    """
    named: list[Message] = []
    calls: tuple[ToolCall, ...] = ()
    by_place = False
    for is_result, group in groupby(messages, key=lambda entry: entry[1].role == "tool"):
        if is_result:
            run = list(group)
            # Results without ids are named by their place, as long as all that answer the turn have none.
            by_place = by_place and not any(message.tool_call_id for _, message in run)
            named += _named_run(run, calls, by_place=by_place)
            continue
        for _, message in group:
            named.append(message)
            if message.role == "assistant":
                calls, by_place = message.tool_calls, bool(message.tool_calls)
    return named


def _named_run(run: list[tuple[int, Message]], calls: tuple[ToolCall, ...], *, by_place: bool) -> Iterator[Message]:
    matches = match_ids([message.tool_call_id for _, message in run], calls)
    for (index, message), match in zip(run, matches, strict=True):
        if match is None and message.name is None and not by_place:
            refuse(
                f"messages[{index}].tool_call_id",
                "tool_name_unresolvable",
                f"{shown(message.tool_call_id)} answers no call of the preceding assistant message (its ids: "
                f"{shown([call.id for call in calls])}); send that message too, or the tool's `name`",
            )
        yield message if match is None else replace(message, name=calls[match].name)


def _merge_split_turns(messages: list[Message]) -> list[Message]:
    """Join prose and calls of one turn that a client stored as two assistant messages.

    Left apart they teach K3, in context, to stop after prose. Only an unambiguous pair is joined: prose
    without calls directly followed by calls without prose or reasoning.
    """
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.role == message.role == "assistant"
            and not last.tool_calls
            and message.tool_calls
            and not message.content
            and not message.reasoning
            and last.name == message.name
        ):
            ttl_s = longest_ttl_s((last.cache_ttl_s, message.cache_ttl_s))
            merged[-1] = replace(last, tool_calls=message.tool_calls, cache_ttl_s=ttl_s)
        else:
            merged.append(message)
    return merged
