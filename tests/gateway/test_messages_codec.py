"""Messages requests as chat completions: the same conversation gives the same ids, and nothing is ignored."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.gateway.anthropic.decode import decode, session_in
from agent_runtime.gateway.anthropic.encode import arguments_object
from k3_sglang.chat.encode import encode
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.types import Message
from tests.gateway.bodies import WEATHER_TOOL
from tests.gateway.messages import IMAGE, MARK, WEATHER, Json, ask, calls_and, result, text, with_call
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
            {"type": "tool_use", "id": name, "name": "get_weather", "input": given_}
            for name, given_ in zip(names, calls, strict=True)
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


def test_arguments_that_no_number_can_hold_stay_text() -> None:
    long = "1" * 5000
    found = arguments_object(f'{{"a": 1e999, "b": {long}, "c": NaN, "d": 1.5, "e": [-1e999, 2]}}')
    assert found == {"a": "1e999", "b": long, "c": "NaN", "d": 1.5, "e": ["-1e999", 2]}
    assert json.dumps(found, allow_nan=False)
    assert arguments_object(" ") == {}
