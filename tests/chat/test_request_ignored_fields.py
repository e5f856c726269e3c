"""No field is accepted without effect: what the prompt cannot say is refused by name."""

import tracemalloc
from typing import Any

import pytest

from k3_sglang.chat.encode import encode, render
from k3_sglang.chat.errors import MAX_PARAM_CHARS, ChatRequestError
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest

USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
CALL: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKED: dict[str, Any] = {"role": "assistant", "tool_calls": [CALL]}
SCHEMA: dict[str, Any] = {"name": "x", "schema": {"type": "object"}}


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], **fields}


def text_part(**more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "x", **more}]}


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{**USER, "reasoning_content": "hm"}]}, "messages[0].reasoning_content"),
        ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{**USER, "tool": "f"}]}, "messages[0].tool"),
        ({"messages": [USER, ASKED, {"role": "tool", "tool_call_id": "a", "reasoning": "x"}]}, "messages[2].reasoning"),
        ({"messages": [{"role": "system", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "system", "name": "n", "tools": [TOOL]}]}, "messages[0].name"),
        ({"messages": [text_part(annotations=[1])]}, "messages[0].content[0].annotations"),
        (body(response_format={"type": "text", "schema": {}}), "response_format.schema"),
        (body(response_format={"type": "json_object", "json_schema": SCHEMA}), "response_format.json_schema"),
        (body(response_format={"type": "json_schema", "json_schema": SCHEMA, "x": 1}), "response_format.x"),
        (
            body(response_format={"type": "json_schema", "json_schema": {**SCHEMA, "x": 1}}),
            "response_format.json_schema.x",
        ),
        (
            body(response_format={"type": "json_schema", "json_schema": {**SCHEMA, "strict": "yes"}}),
            "response_format.json_schema.strict",
        ),
        (
            body(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}, "mode": "auto"}),
            "tool_choice.mode",
        ),
        (
            body(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f", "arguments": "{}"}}),
            "tool_choice.function.arguments",
        ),
    ],
)
def test_a_field_without_a_place_in_the_prompt_is_refused(request_: dict[str, Any], param: str) -> None:
    with pytest.raises(ChatRequestError) as caught:
        parse_request(request_)
    assert caught.value.param == param


def test_what_clients_send_empty_with_every_message_is_accepted() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    padded = {**USER, "tool_calls": [], "tool_call_id": "", "reasoning_content": None, **mark}
    part = text_part(**mark, annotations=None)
    request = parse_request({"messages": [padded, part]})
    assert request.messages[0] == parse_request(body()).messages[0]


@pytest.mark.parametrize("arguments", ["null", " null\n", "", "  ", None, {}, "{}"])
def test_every_way_to_say_no_arguments_renders_a_call_without_any(arguments: Any) -> None:
    """Servers write "null" for a call of a tool without parameters, and clients send it back as it came."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (turn,) = parse_request({"messages": [{"role": "assistant", "tool_calls": [call]}]}).messages
    text = "".join(segment.text for segment in render(ChatRequest((turn,))))
    assert '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>' in text


def test_the_path_in_a_refusal_is_bounded() -> None:
    with pytest.raises(ChatRequestError) as caught:
        parse_request({"messages": [{**USER, "x" * 10_000: 1}]})
    assert len(caught.value.param) < 2 * MAX_PARAM_CHARS and len(str(caught.value)) < 4 * MAX_PARAM_CHARS


def test_long_names_and_texts_are_encoded_but_not_remembered(toy: K3Tokenizer) -> None:
    """Each would stay in a cache until thousands of others had come: a few requests could fill the memory."""

    def encoded_tokens(number: int) -> int:
        name = f"{number} " * 60_000
        call = {"id": "a", "function": {"name": name, "arguments": {name: 1}}}
        messages = [{**USER, "name": name}, {"role": "assistant", "tool_calls": [call]}]
        return len(encode(parse_request({"messages": messages}), toy).ids)

    tracemalloc.start()
    try:
        assert all(encoded_tokens(number) > 300_000 for number in range(5))
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 1_000_000
