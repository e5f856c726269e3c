"""Messages requests that cannot be served: each field at fault is named as the client wrote it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.gateway.anthropic.decode import decode
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.types import ImagePart
from tests.gateway.messages import IMAGE, MARK, WEATHER, Json, ask, result, text, with_call


def user_with(block: Json) -> Json:
    """A request whose first block is this one."""
    return ask([block, text("x")])


FROM_MCP = {"type": "tool_addition", "tool": {"type": "mcp_toolset_reference"}}
CLEAR = {"type": "clear_thinking_20251015"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (ask(max_tokens=None), "max_tokens"),
        (ask(max_tokens=0), "max_tokens"),
        (ask(max_tokens=True), "max_tokens"),
        (ask(surprise=1), "surprise"),
        (ask(container="c"), "container"),
        (ask(mcp_servers=[{"type": "url"}]), "mcp_servers"),
        (ask(fallbacks=[{"model": "x"}]), "fallbacks"),
        (ask(speed="fast"), "speed"),
        (ask(service_tier="priority"), "service_tier"),
        (ask(inference_geo="us"), "inference_geo"),
        (ask(messages="hi"), "messages"),
        (ask(messages=[{"role": "tool", "content": "x"}]), "messages.0.role"),
        (ask(messages=[*ask()["messages"], {"role": "assistant", "content": "I"}]), "messages.1.role"),
        (ask(messages=[{"role": "user", "content": "x", "name": "y"}]), "messages.0.name"),
        (ask(messages=[{"role": "system", "content": "x", "clear_at": "next_user_message"}]), "messages.0.clear_at"),
        (
            ask(messages=[{"role": "system", "content": "x", "output_config": {"effort": "low"}}]),
            "messages.0.output_config",
        ),
        (
            ask(messages=[{"role": "system", "content": [{"type": "tool_removal", "tool": {}}]}]),
            "messages.0.content.0.type",
        ),
        (
            ask(messages=[{"role": "system", "content": [FROM_MCP]}]),
            "messages.0.content.0.tool.type",
        ),
        (ask(messages=[{"role": "system", "content": [IMAGE]}]), "messages.0.content.0.type"),
        (ask(5), "messages.0.content"),
        (user_with({"type": "document", "source": {}}), "messages.0.content.0.type"),
        (user_with({"type": "search_result"}), "messages.0.content.0.type"),
        (user_with({"type": "thinking", "thinking": "x"}), "messages.0.content.0.type"),
        (user_with({"type": "server_tool_use"}), "messages.0.content.0.type"),
        (user_with(text("x", citations=[{}])), "messages.0.content.0.citations"),
        (user_with(text("x", other=1)), "messages.0.content.0.other"),
        (user_with({"type": "image", "source": {"type": "file", "file_id": "f"}}), "messages.0.content.0.source.type"),
        (user_with({"type": "image", "source": {"type": "url", "url": 5}}), "messages.0.content.0.source.url"),
        (user_with({"type": "image"}), "messages.0.content.0.source"),
        (with_call(result("toolu_1", [{"type": "document"}])), "messages.2.content.0.content.0.type"),
        (with_call(result("toolu_1", "x", is_error="no")), "messages.2.content.0.is_error"),
        (
            with_call(result("toolu_1", [{"type": "tool_reference", "tool_name": "x"}])),
            "messages.2.content.0.content.0.tool_name",
        ),
        (
            with_call({"role": "assistant", "content": [{"type": "web_search_tool_result"}]}),
            "messages.2.content.0.type",
        ),
        (
            with_call({"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": "{}"}]}),
            "messages.2.content.0.input",
        ),
        (
            with_call({"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": 1}]}),
            "messages.2.content.0.signature",
        ),
        (ask(system=[IMAGE]), "system.0.type"),
        (ask(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "tools.0.type"),
        (ask(tools=[{"type": "bash_20250124", "name": "bash"}]), "tools.0.type"),
        (ask(tools=[{"name": "a"}]), "tools.0.input_schema"),
        (ask(tools=[{**WEATHER, "input_examples": [{}]}]), "tools.0.input_examples"),
        (ask(tools=[{**WEATHER, "allowed_callers": ["code_execution_20250825"]}]), "tools.0.allowed_callers"),
        (ask(tools=[{**WEATHER, "defer_loading": 1}]), "tools.0.defer_loading"),
        (ask(tools=[{**WEATHER, "other": 1}]), "tools.0.other"),
        (ask(tool_choice={"type": "some"}), "tool_choice"),
        (ask(tool_choice={"type": "auto", "other": 1}), "tool_choice.other"),
        (ask(thinking={"type": "between_tools"}), "thinking.type"),
        (ask(thinking={"type": "enabled", "budget_tokens": 0}), "thinking.budget_tokens"),
        (ask(thinking={"type": "adaptive", "display": "all"}), "thinking.display"),
        (ask(thinking={"type": "adaptive", "block_binding": {"a": 1}}), "thinking.block_binding"),
        (ask(output_config={"effort": "minimal"}), "output_config.effort"),
        (ask(output_config={"task_budget": {}}), "output_config.task_budget"),
        (ask(output_config={"format": {"type": "json_object"}}), "output_config.format"),
        (ask(metadata={"user_id": 5}), "metadata.user_id"),
        (ask(metadata={"other": "x"}), "metadata.other"),
        (ask(context_management={"edits": [CLEAR]}), "context_management.edits.0.keep"),
        (
            ask(context_management={"edits": [{**CLEAR, "keep": {"type": "thinking_turns", "value": 1}}]}),
            "context_management.edits.0.keep",
        ),
        (ask(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}), "context_management.edits.0.type"),
        (ask(context_management={"edits": [{"type": "compact_20260112"}]}), "context_management.edits.0.type"),
    ],
)
def test_what_cannot_be_done_is_refused_at_its_place(body: Json, param: str) -> None:
    with pytest.raises(ChatRequestError) as refused:
        decode(body)
    assert refused.value.param == param
    assert "got " in refused.value.message or len(refused.value.message) > 20


EVERYTHING = {
    **with_call(
        result("toolu_1", [text("rain"), IMAGE, {"type": "tool_reference", "tool_name": "later"}], is_error=True),
        {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": "k3.a"}, text("b")]},
        {"role": "user", "content": [text("Go on", cache_control=MARK)]},
    ),
    "system": [text("Be short.", cache_control=MARK)],
    "tools": [WEATHER, {"name": "later", "input_schema": {}, "defer_loading": True}],
    "tool_choice": {"type": "tool", "name": "get_weather"},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "metadata": {"user_id": '{"session_id": "a"}'},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stop_sequences": ["a"],
}
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a JSON value."""
    keys: Any = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((*path, key), *places_in(value[key], (*path, key)))]


def altered(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The value with something else at a path; as it is where the path leads nowhere."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(value, dict) and key in value:
        return {**value, key: altered(value[key], rest, new)}
    if isinstance(value, list) and isinstance(key, int) and key < len(value):
        items: list[Any] = value
        return [*items[:key], altered(items[key], rest, new), *items[key + 1 :]]
    return value


def test_what_is_altered_below_is_served_as_it_stands() -> None:
    assert parse_request(decode(EVERYTHING).body, images=lambda source, _: ImagePart(source, (28, 28))).tools


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(places_in(EVERYTHING)), junk), min_size=1, max_size=2))
def test_whatever_stands_in_a_request_it_is_read_or_refused(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    body: Any = EVERYTHING
    for path, value in changes:
        body = altered(body, path, value)
    try:
        parse_request(decode(body).body, images=lambda source, _: ImagePart(source, (28, 28)))
    except ChatRequestError as refused:
        assert refused.param and refused.code
