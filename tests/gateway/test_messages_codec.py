"""Messages requests as chat completions: the same conversation gives the same ids, and nothing is ignored."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.gateway.anthropic.decode import decode, session_in
from k3_sglang.chat.encode import encode
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.types import Message
from tests.gateway.bodies import WEATHER_TOOL
from tests.gateway.messages import MARK, WEATHER, Json, ask, result, text
from tests.gateway.vocabulary import byte_tokenizer

TOKENIZER = byte_tokenizer()

LATER: Json = {"name": "later", "description": "Loaded later.", "input_schema": {"type": "object"}}
LATER_CHAT: Json = {
    "type": "function",
    "function": {"name": "later", "description": "Loaded later.", "parameters": {"type": "object"}},
}


def ids_of(chat: Json) -> tuple[int, ...]:
    """Ids of a chat completion's prompt."""
    return tuple(encode(parse_request(chat), TOKENIZER).ids)


def messages_of(body: Json) -> tuple[Message, ...]:
    """Messages of a decoded request."""
    return parse_request(decode(body).body).messages


def calls_and(*following: Json) -> list[Json]:
    """A conversation with a call, then what follows it."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": [call]}, *following]


def with_call(*following: Json, **fields: Any) -> Json:
    """A request of such a conversation."""
    return {**ask(tools=[WEATHER], **fields), "messages": calls_and(*following)}


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
values = st.one_of(words, st.integers(-5, 5), st.booleans(), st.none(), st.lists(st.integers(0, 3), max_size=2))
arguments = st.dictionaries(words, values, max_size=3)
splits = st.integers(1, 3)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Json], list[Json]]:
    """One conversation for both: as chat messages, and as messages of this API in some of their spellings."""
    chat: list[Json] = []
    sent: list[Json] = []
    for turn in range(draw(st.integers(1, 4))):
        said = draw(words)
        parts = [said[: len(said) // 2], said[len(said) // 2 :]] if draw(st.booleans()) else [said]
        chat.append({"role": "user", "content": said})
        sent.append({"role": "user", "content": said if len(parts) == 1 else [text(part) for part in parts]})
        if draw(st.booleans()):
            note = draw(words)
            chat.append({"role": "system", "content": note})
            sent.append({"role": "system", "content": draw(st.sampled_from([note, [text(note)]]))})
        thinking, prose = draw(st.one_of(st.just(""), words)), draw(st.one_of(st.just(""), words))
        calls = draw(st.lists(arguments, max_size=2))
        blocks: list[Json] = [{"type": "thinking", "thinking": thinking, "signature": ""}] if thinking else []
        blocks += [text(prose)] if prose else []
        names = [f"toolu_{turn}_{number}" for number in range(len(calls))]
        blocks += [
            {"type": "tool_use", "id": name, "name": "get_weather", "input": given_} for name, given_ in zip(names, calls, strict=True)
        ]
        functions = [{"name": "get_weather", "arguments": json.dumps(given_)} for given_ in calls]
        chat.append(
            {
                "role": "assistant",
                "content": prose,
                "reasoning_content": thinking,
                "tool_calls": [
                    {"id": name, "type": "function", "function": function}
                    for name, function in zip(names, functions, strict=True)
                ],
            }
        )
        cut = draw(st.integers(0, len(blocks)))
        pieces = [blocks[:cut], blocks[cut:]] if 0 < cut < len(blocks) else [blocks]
        sent += [{"role": "assistant", "content": piece} for piece in pieces]
        answers = [draw(words) for _ in names]
        chat += [
            {"role": "tool", "tool_call_id": name, "content": answer}
            for name, answer in zip(names, answers, strict=True)
        ]
        results = [
            {
                "type": "tool_result",
                "tool_use_id": name,
                "content": draw(st.sampled_from([answer, [text(answer)]])),
            }
            for name, answer in zip(names, answers, strict=True)
        ]
        if results:
            sent.append({"role": "user", "content": results})
    chat.append({"role": "user", "content": "end"})
    sent.append({"role": "user", "content": "end"})
    return chat, sent


@settings(deadline=None)
@given(conversations(), st.sampled_from([None, "low", "medium", "max"]), st.sampled_from(["", "be short"]))
def test_a_conversation_has_the_same_ids_in_both_protocols(
    both: tuple[list[Json], list[Json]], effort: str | None, system: str
) -> None:
    chat, sent = both
    fields: Json = {"output_config": {"effort": effort}} if effort else {}
    if system:
        fields["system"] = [text("be "), text("short")]
    body = {**ask(tools=[WEATHER], **fields), "messages": sent}
    before = json.dumps(body)
    same: Json = {
        "messages": [*([{"role": "system", "content": system}] if system else []), *chat],
        "tools": [WEATHER_TOOL],
        **({"reasoning_effort": effort} if effort else {}),
    }
    assert ids_of(decode(body).body) == ids_of(same)
    assert json.dumps(body) == before, "the body is what the ledger keeps"


def test_results_stand_behind_their_calls_whatever_was_said_before_them() -> None:
    content = [text("Note"), *result("toolu_1", "rain")["content"], text("Go on")]
    found = messages_of(with_call({"role": "user", "content": content}))
    assert [message.role for message in found] == ["user", "assistant", "tool", "user"]


def test_a_failed_result_says_so_once() -> None:
    def content(value: Any) -> Any:
        return messages_of(with_call(result("toolu_1", value, is_error=True)))[-1].content

    assert content("Exit code 1") == "Error: Exit code 1"
    assert content([text("Exit code 1")]) == "Error: Exit code 1"
    assert content("<tool_use_error>No such file</tool_use_error>") == "<tool_use_error>No such file</tool_use_error>"
    assert content("Error: gone") == "Error: gone"
    assert content("") == content(None) == "Error: "
    assert messages_of(with_call(result("toolu_1", "rain", is_error=False)))[-1].content == "rain"


def test_a_tool_that_is_loaded_later_is_declared_where_it_is_loaded_and_once() -> None:
    loads = result("toolu_1", [{"type": "tool_reference", "tool_name": "later"}])
    tools = [WEATHER, {**LATER, "defer_loading": True}, {**LATER, "name": "never", "defer_loading": True}]
    body = {**with_call(loads, {"role": "user", "content": "Go"}), "tools": tools}
    chat = decode(body).body
    assert chat["tools"] == [WEATHER_TOOL]
    assert chat["messages"][3] == {"role": "system", "tools": [LATER_CHAT]}
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "tool", "system", "user"]
    twice = {**body, "messages": [*body["messages"], *calls_and(loads)[1:]]}
    assert sum("tools" in message for message in decode(twice).body["messages"]) == 1
    assert ids_of(decode(twice).body)


@pytest.mark.parametrize(
    ("tool", "tools"),
    [
        ({"type": "tool_reference", "name": "later"}, [WEATHER, {**LATER, "defer_loading": True}]),
        ({"type": "tool_definition", "definition": LATER}, [WEATHER]),
    ],
)
def test_a_tool_added_in_a_conversation_is_declared_there(tool: Json, tools: list[Json]) -> None:
    added = {"role": "system", "content": [{"type": "tool_addition", "tool": tool}]}
    body = {**ask(tools=tools), "messages": [{"role": "user", "content": "a"}, added, {"role": "user", "content": "b"}]}
    assert decode(body).body["messages"][1] == {"role": "system", "tools": [LATER_CHAT]}


def test_marks_stay_where_the_client_put_them() -> None:
    body = with_call(result("toolu_1", [text("a"), text("b", cache_control={**MARK, "ttl": "1h"})], cache_control=MARK))
    body["system"] = [text("one", cache_control=MARK), text("two")]
    body["tools"] = [{**WEATHER, "cache_control": MARK}]
    body["messages"][1]["content"].insert(0, text("I look.", cache_control=MARK))
    request = parse_request(decode(body).body)
    system, _, turn, told = request.messages
    assert request.tools_cache_ttl_s == 300
    assert isinstance(system.content, tuple) and [part.cache_ttl_s for part in system.content] == [300, None]
    assert turn.cache_ttl_s == 300 and turn.content == "I look."
    assert isinstance(told.content, tuple) and [part.cache_ttl_s for part in told.content] == [None, 3600]
    assert told.cache_ttl_s == 300
    automatic = parse_request(decode(ask(cache_control=MARK)).body)
    assert automatic.messages[-1].cache_ttl_s == 300


def test_thinking_comes_back_as_one_text_with_the_signature_that_was_made_here() -> None:
    blocks = [
        {"type": "thinking", "thinking": "one ", "signature": "ErUBCkYIBxgC"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "thinking", "thinking": "two", "signature": "k3.abc"},
        text("Hi", citations=None),
    ]
    body = {**ask(), "messages": [*ask()["messages"], {"role": "assistant", "content": blocks}, *ask()["messages"]]}
    turn = messages_of(body)[1]
    assert (turn.reasoning, turn.signature, turn.content) == ("one two", "k3.abc", "Hi")


@pytest.mark.parametrize(
    ("fields", "effort", "thinks"),
    [
        ({}, "max", True),
        ({"thinking": {"type": "adaptive", "display": "updates"}}, "max", True),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"}}, "high", True),
        ({"output_config": {"effort": "xhigh"}}, "max", True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low", True),
        ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, "high", True),
        ({"thinking": {"type": "enabled", "budget_tokens": 16384}}, "max", True),
        ({"thinking": {"type": "enabled", "budget_tokens": 9999}, "output_config": {"effort": "low"}}, "low", True),
        ({"thinking": {"type": "disabled"}}, None, False),
    ],
)
def test_effort_is_found_wherever_it_stands(fields: Json, effort: str | None, thinks: bool) -> None:
    request = parse_request(decode(ask(**fields)).body)
    assert (request.effort, request.thinking) == (effort, thinks)


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "parallel_tool_calls": False},
        ),
    ],
)
def test_tool_choice_has_its_counterpart(choice: Json, fields: Json) -> None:
    body = decode(ask(tools=[WEATHER], tool_choice=choice)).body
    assert {key: body.get(key) for key in fields} == fields
    parse_request(body)


def test_an_output_format_is_a_response_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    asked = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": asked}}, {"output_format": asked}):
        found = parse_request(decode(ask(**fields)).body).response_format
        assert found is not None and found.schema == schema


@pytest.mark.parametrize(
    ("user", "session"),
    [
        ('{"device_id":"d","account_uuid":"","session_id":"d59432b8-c0f2"}', "d59432b8-c0f2"),
        ("user_0f3a_account_5b1c_session_d59432b8-c0f2", "d59432b8-c0f2"),
        ("someone", None),
        ('{"device_id":"d"}', None),
        ("[1]", None),
    ],
)
def test_the_session_is_found_in_the_users_id(user: str, session: str | None) -> None:
    assert session_in(user) == session
    body = decode(ask(metadata={"user_id": user})).body
    assert body.get("metadata") == ({"session_id": session} if session else None)
    assert body.get("user") == (None if session else user)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def test_images_have_their_counterpart_in_messages_and_results() -> None:
    linked = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}, "cache_control": MARK}
    body = {**with_call(result("toolu_1", [IMAGE])), "tools": [WEATHER]}
    body["messages"].append({"role": "user", "content": [text("See"), linked]})
    messages = decode(body).body["messages"]
    assert messages[2]["content"] == [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    assert messages[3]["content"][1] == {
        "type": "image_url",
        "image_url": {"url": "https://example.org/a.png"},
        "cache_control": MARK,
    }


def user_with(block: Json) -> Json:
    """A request whose first block is this one."""
    return ask([block, text("x")])


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
            ask(messages=[{"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "mcp_toolset_reference"}}]}]),
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
