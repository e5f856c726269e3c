"""Requests of the Responses API become the chat completion they mean; what they cannot mean is refused by name."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.responses.decode import decode
from agent_runtime.gateway.responses.listing import as_shown, with_ids
from k3_sglang.chat.encode import encode
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.request import PROMPT_FIELDS, parse_request
from tests.gateway.bodies import MODEL, WEATHER_TOOL
from tests.gateway.responses_items import FLAT_TOOL, asks, items_of, message, output
from tests.gateway.vocabulary import byte_tokenizer

CALL = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Oslo"}'}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
NAMED = {"type": "function", "name": "get_weather"}
TURN = "0123456789abcdef" * 2


def ids_of(chat: dict[str, Any]) -> list[int]:
    """The prompt of a chat body."""
    return list(encode(parse_request({key: chat[key] for key in PROMPT_FIELDS & set(chat)}), byte_tokenizer()).ids)


def messages_of(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The chat messages that items become."""
    return decode(asks(list(items), **fields)).chat["messages"]


def conversations() -> st.SearchStrategy[list[dict[str, Any]]]:
    """Chat messages of whole turns, ending with something to answer."""
    text = st.text("ab <|🙂\n", max_size=6)
    values = st.dictionaries(text, text | st.integers(0, 3) | st.booleans(), max_size=2)

    def turn(number: int, parts: tuple[str, str, str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        question, thinking, content, arguments = parts
        calls = [
            {"id": f"c{number}_{i}", "type": "function", "function": {"name": "f", "arguments": json.dumps(value)}}
            for i, value in enumerate(arguments)
        ]
        said = {"role": "assistant", "reasoning_content": thinking, "content": content}
        results = [{"role": "tool", "tool_call_id": call["id"], "content": question} for call in calls]
        return [
            {"role": "user" if number % 2 else "developer", "content": question},
            said | ({"tool_calls": calls} if calls else {}),
            *reversed(results),
        ]

    groups = st.lists(st.tuples(text, text, text, st.lists(values, max_size=2)), max_size=4)
    return groups.map(lambda found: [sent for at, parts in enumerate(found) for sent in turn(at, parts)])


@settings(deadline=None)
@given(history=conversations(), instructions=st.sampled_from(["", "Be brief."]), split=st.integers(0, 20))
def test_any_conversation_has_the_ids_it_has_as_chat_sent_whole_or_continued(
    history: list[dict[str, Any]], instructions: str, split: int
) -> None:
    history = [*history, {"role": "user", "content": "last"}]
    system = [{"role": "system", "content": instructions}] if instructions else []
    expected = ids_of({"messages": [*system, *history], "tools": [WEATHER_TOOL]})
    items = items_of(history)
    fields = {"instructions": instructions or None, "tools": [FLAT_TOOL]}
    assert ids_of(decode(asks(items, **fields)).chat) == expected
    assert ids_of(decode(asks(items[split:], **fields), items[:split]).chat) == expected


def broken_bodies() -> st.SearchStrategy[dict[str, Any]]:
    """A sound request in which some values are replaced by others, which mostly have no place there."""
    words = st.sampled_from(
        ["message", "reasoning", "function_call", "item_reference", "auto", "user", "text", "", "x"]
    )
    odd = st.recursive(
        st.none() | st.booleans() | st.integers(-1, 3) | words,
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(["type", "id", "role", "content", "text", "name", "tools"]), inner, max_size=3
            )
        ),
        max_leaves=5,
    )
    sound = asks(
        [message("user", "x"), THOUGHT, {**CALL, "id": "fc_1"}, output("c1", "y")], tools=[FLAT_TOOL],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}, text={"format": {"type": "text"}},
        reasoning={"effort": "low"}, include=["reasoning.encrypted_content"],
    )  # fmt: skip
    places: list[tuple[Any, ...]] = [
        *((key,) for key in sound), ("input", 0), ("input", 0, "role"), ("input", 0, "content"),
        ("input", 1, "content"), ("input", 1, "summary"), ("input", 1, "id"), ("input", 2, "id"),
        ("input", 2, "name"), ("input", 2, "status"),
        ("input", 3, "output"), ("input", 3, "type"), ("tools", 0), ("tools", 0, "type"), ("tools", 0, "name"),
        ("tool_choice", "tools"), ("tool_choice", "mode"), ("text", "format"), ("reasoning", "summary"),
    ]  # fmt: skip

    def changed(changes: list[tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
        body = json.loads(json.dumps(sound))
        for (*path, last), value in changes:
            owner: Any = body
            for key in path:
                held = isinstance(owner, list) and isinstance(key, int) and key < len(owner)
                owner = owner[key] if held or (isinstance(owner, dict) and key in owner) else None
            if isinstance(owner, dict) or (isinstance(owner, list) and isinstance(last, int) and last < len(owner)):
                owner[last] = value
        return body

    return st.lists(st.tuples(st.sampled_from(places), odd), min_size=1, max_size=3).map(changed)


@settings(deadline=None, max_examples=400)
@given(body=broken_bodies())
def test_any_body_is_understood_or_refused(body: dict[str, Any]) -> None:
    try:
        decoded = decode(body)
    except ApiError as error:
        assert error.status in (400, 404) and error.message
        return
    items = with_ids(decoded.items, TURN)
    assert all(isinstance(item["id"], str) and as_shown(item) for item in items)
    try:
        parse_request({key: decoded.chat[key] for key in PROMPT_FIELDS & set(decoded.chat)})
    except ChatRequestError as error:
        told = decoded.blame.error(ApiError(400, str(error), param=error.param))
        assert not re.search(r"\bmessages\[", f"{told.param} {told.message}")


def test_every_field_with_a_meaning_reaches_the_chat_completion() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    body = asks(
        "Hi", tools=[{**FLAT_TOOL, "strict": None}], tool_choice={"type": "function", "name": "get_weather"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}, "verbosity": "medium"},
        reasoning={"effort": "low", "summary": "auto"}, max_output_tokens=7, temperature=0.5, top_p=0.5, user="u",
        metadata={"a": "b"}, prompt_cache_key="k", parallel_tool_calls=False, stream=True, safety_identifier="s",
        service_tier="auto", truncation="disabled", top_logprobs=0, store=True, background=False, instructions="Sys",
        client_metadata={"session_id": "not a session of ours"},
    )  # fmt: skip
    assert decode(body).chat == {
        "model": MODEL, "messages": [{"role": "system", "content": "Sys"}, {"role": "user", "content": "Hi"}],
        "tools": [WEATHER_TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        "reasoning_effort": "low", "max_completion_tokens": 7, "temperature": 0.5, "top_p": 0.5, "user": "u",
        "metadata": {"a": "b"}, "prompt_cache_key": "k", "parallel_tool_calls": False, "stream": True,
        "safety_identifier": "s", "service_tier": "auto",
    }  # fmt: skip


def test_items_of_a_turn_become_one_message() -> None:
    prose = {
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I "}, {"type": "output_text", "text": "look"}],
    }
    named = {**output("c1", "x"), "name": "get_weather", "namespace": None}  # as Codex sends it
    turn, result = messages_of(THOUGHT, prose, CALL, {**CALL, "call_id": "c2"}, named)
    assert (turn["reasoning_content"], turn["content"]) == ("hm", "I look")
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "x"}


def test_what_a_function_says_without_a_call_is_a_message_of_the_developer() -> None:
    goal = {"type": "function_call_output", "name": "goal_objective", "namespace": "agent", "output": "Be brief."}
    turn, result, said = messages_of(CALL, output("c1", "x"), goal)
    assert (turn["role"], result["role"]) == ("assistant", "tool")
    assert said == {"role": "developer", "content": "Be brief."}


def test_what_cannot_be_one_turn_is_two() -> None:
    said = message("assistant", "x")
    assert [len(messages_of(*items)) for items in ([THOUGHT, said, THOUGHT], [said, said], [CALL, said])] == [2, 2, 2]
    assert len(messages_of(CALL, output("c1", "x"), {**CALL, "call_id": "c2"}, output("c2", "y"))) == 4


def test_ids_made_here_keep_a_turn_together_and_turns_apart() -> None:
    first = {**CALL, "id": f"fc_{TURN}0001"}
    second = {**CALL, "id": f"fc_{TURN}0002", "call_id": "c2"}
    turn, *results = messages_of(first, output("c1", "x"), second, output("c2", "y"))
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]
    assert [sent["tool_call_id"] for sent in results] == ["c1", "c2"]
    other = {**CALL, "id": f"fc_{TURN[::-1]}0000"}
    assert len(messages_of({**THOUGHT, "id": f"rs_{TURN}0000"}, other)) == 2


def test_thinking_comes_from_the_content_and_the_signature_or_else_from_a_summary() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "sum"}], "encrypted_content": "gAAA"}
    (turn,) = messages_of(summary)
    assert turn == {"role": "assistant", "content": None, "reasoning_content": "sum"}
    (turn,) = messages_of({**summary, "encrypted_content": "k3.abc"})
    assert turn == {"role": "assistant", "content": None, "k3_signature": "k3.abc"}
    (turn,) = messages_of({**THOUGHT, "encrypted_content": "k3.abc"})
    assert turn["reasoning_content"] == "hm" and turn["k3_signature"] == "k3.abc"


def test_a_call_that_was_cut_is_no_call() -> None:
    (turn,) = messages_of(message("assistant", "x"), {**CALL, "arguments": '{"ci', "status": "incomplete"})
    assert "tool_calls" not in turn


def test_pictures_and_results_in_parts_are_handed_on() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}
    text = {"type": "input_text", "text": "see"}
    sent, _, result = messages_of(
        {"role": "user", "content": [text, picture]}, CALL, {**output("c1", ""), "output": [text, picture]}
    )
    parts = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "auto"}},
    ]
    assert sent["content"] == result["content"] == parts


def test_a_reference_is_the_stored_item() -> None:
    stored = {**THOUGHT, "id": "rs_1"}
    body = asks([{"type": "item_reference", "id": "rs_1"}, message("assistant", "x"), message("user", "y")])
    decoded = decode(body, (), {"rs_1": stored}.get)
    assert decoded.items[0] is stored and decoded.chat["messages"][0]["reasoning_content"] == "hm"
    with pytest.raises(ApiError, match="store=false") as refused:
        decode(body)
    assert (refused.value.status, refused.value.param) == (404, "input[0].id")


TWO_TOOLS: list[dict[str, Any]] = [FLAT_TOOL, {**FLAT_TOOL, "name": "other"}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "allowed_tools", "mode": "auto", "tools": [NAMED, {**NAMED, "name": "other"}]}, "auto"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "none"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [NAMED]},
            {"type": "function", "function": {"name": "get_weather"}},
        ),
        ("required", "required"),
    ],
)
def test_choices_that_can_be_said_to_k3(choice: Any, expected: Any) -> None:
    assert decode(asks(tools=TWO_TOOLS, tool_choice=choice)).chat["tool_choice"] == expected


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    (asks(None), "input", "expected a string or a list"),
    (asks([]), "input", "the list is empty"),
    (asks([1]), "input[0]", "an item object"),
    (asks([{"type": "web_search_call", "id": "x"}]), "input[0].type", "function_call_output"),
    (asks([{"type": "custom_tool_call"}]), "input[0].type", "free text has no form"),
    (asks([{"type": "compaction", "encrypted_content": "x"}]), "input[0].type", "nothing here can read it"),
    (asks([{"type": "surprise"}]), "input[0].type", "accepted are"),
    (asks([{"role": "critic", "content": "x"}]), "input[0].role", "allowed are"),
    (asks([{"role": "user", "content": "x", "mood": "y"}]), "input[0].mood", "no field"),
    (asks([{"role": "user", "content": [{"type": "input_file"}]}]), "input[0].content[0].type", "send their text"),
    (asks([{"role": "user", "content": [{"type": "input_audio"}]}]), "input[0].content[0].type", "hears nothing"),
    (
        asks([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]),
        "input[0].content[0].file_id",
        "no files",
    ),
    (asks([{**CALL, "arguments": {}}]), "input[0].arguments", "a string"),
    (asks([{**CALL, "namespace": "n"}]), "input[0].namespace", "plain names"),
    (asks([{**output("c1", "x"), "error": True}]), "input[0].error", "no field"),
    (
        asks([{"type": "reasoning", "content": [{"type": "text", "text": "x"}]}]),
        "input[0].content[0]",
        "reasoning_text",
    ),
    (asks(tools={}), "tools", "a list of tools"),
    (asks(tools=[{"type": "web_search"}]), "tools[0].type", "the provider runs"),
    (asks(tools=[{"type": "file_search"}]), "tools[0].type", "the provider runs"),
    (asks(tools=[{"type": "computer_use_preview"}]), "tools[0].type", "the provider runs"),
    (asks(tools=[{"type": "code_interpreter"}]), "tools[0].type", "the provider runs"),
    (asks(tools=[{"type": "mcp"}]), "tools[0].type", "no MCP server"),
    (asks(tools=[{"type": "local_shell"}]), "tools[0].type", "run it in the client"),
    (asks(tools=[{"type": "apply_patch"}]), "tools[0].type", "apply the patch in the client"),
    (asks(tools=[{"type": "custom", "name": "x"}]), "tools[0].type", "free text and grammars"),
    (asks(tools=[WEATHER_TOOL]), "tools[0].function", "in the tool itself"),
    (asks(tools=[{**FLAT_TOOL, "defer_loading": True}]), "tools[0].defer_loading", "no field"),
    (asks(tool_choice="any"), "tool_choice", "allowed are auto"),
    (asks(tool_choice={"type": "web_search"}), "tool_choice.type", "other tools do not exist"),
    (
        asks(tools=TWO_TOOLS, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}),
        "tool_choice.tools",
        "1 of 2 tools",
    ),
    (
        asks(tools=TWO_TOOLS, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}),
        "tool_choice.tools[0]",
        "name declared tools",
    ),
    (asks(tool_choice={"type": "allowed_tools", "mode": "some", "tools": []}), "tool_choice.mode", "required"),
    (asks(text={"verbosity": "low"}), "text.verbosity", "no such setting"),
    (asks(text={"format": "json"}), "text.format", "an object"),
    (asks(reasoning={"summary": "detailed"}), "reasoning.summary", "nothing is summarised"),
    (asks(reasoning={"budget": 1}), "reasoning.budget", "no field"),
    (asks(conversation="c"), "conversation", "previous_response_id"),
    (asks(prompt={"id": "p"}), "prompt", "no stored prompts"),
    (asks(max_tool_calls=3), "max_tool_calls", "runs no tools"),
    (asks(truncation="auto"), "truncation", "no item is ever dropped"),
    (asks([CALL, {**output("c1", "x"), "name": 3}]), "input[1].name", "name of the function"),
    (asks([CALL, {**output("c1", "x"), "namespace": 3}]), "input[1].namespace", "namespace of the function"),
    (asks(client_metadata={"turn": 3}), "client_metadata.turn", "string"),
    (asks(top_logprobs=2), "top_logprobs", "not delivered"),
    (asks(include=["message.output_text.logprobs"]), "include.0", "nothing else"),
    (asks(context_management=[{}]), "context_management", "nothing is compacted"),
    (asks(prompt_cache_retention="24h"), "prompt_cache_retention", "in memory"),
    (
        asks(stream=True, stream_options={"include_obfuscation": True}),
        "stream_options.include_obfuscation",
        "not padded",
    ),
    (asks(stream_options={"include_obfuscation": False}), "", "only allowed with stream"),
    (asks(background=True, store=False), "", "could never be fetched"),
    (asks(background=True, stream=True), "", "until it is done"),
    (asks(max_output_tokens=0), "max_output_tokens", "greater than or equal to 1"),
    (asks(messages=[]), "messages", "Unsupported field"),
    (asks(n=2), "n", "Unsupported field"),
]


@pytest.mark.parametrize(("body", "param", "reason"), REFUSALS, ids=[f"{case[1]}: {case[2]}" for case in REFUSALS])
def test_what_is_not_honoured_is_refused_with_the_field_and_the_reason(
    body: dict[str, Any], param: str, reason: str
) -> None:
    with pytest.raises(ApiError) as refused:
        decode(body)
    assert refused.value.status == 400
    assert (refused.value.param or "") == param
    assert reason in refused.value.message


def test_faults_of_the_chat_body_are_told_in_the_words_of_the_request() -> None:
    blame = decode(
        asks([message("user", "x"), message("user", "y")], instructions="Sys"), [message("user", "old")]
    ).blame
    error = ApiError(400, "messages[3].content[0]: no; response_format.type", param="messages[3].content[0]")
    assert (told := blame.error(error)).param == "input[1].content[0]"
    assert told.message == "input[1].content[0]: no; text.format.type"
    params = ["messages[0]", "messages[1]", "messages", "tools[2].function.name", "reasoning_effort", "temperature"]
    assert [blame.error(ApiError(400, "", param=param)).param for param in params] == [
        "instructions", "previous_response_id", "input", "tools[2].name", "reasoning.effort", "temperature",
    ]  # fmt: skip
    notes = {"replay": {"turns": [{"index": 3}], "prefix": {"holds": False, "index": 0}}}
    assert blame.notes(notes) == {"replay": {"turns": [{"index": 2}], "prefix": {"holds": False, "index": None}}}
