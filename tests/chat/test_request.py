"""What a request may say, what is refused, and which field the refusal names (B20, B32, B33, cases 17, 19, 20)."""

import copy
import json
from typing import Any

import pytest

from k3_sglang.chat.encode import render
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.request import PROMPT_FIELDS, parse_request
from k3_sglang.chat.types import NamedTool, ToolCall

USER = {"role": "user", "content": "hi"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], **fields}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def refusal(request: dict[str, Any]) -> ChatRequestError:
    with pytest.raises(ChatRequestError) as caught:
        parse_request(request)
    return caught.value


def prompt(request: dict[str, Any]) -> str:
    return "".join(segment.text for segment in render(parse_request(request)))


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "invalid_type"),
    ({"messages": []}, "messages", "empty_messages"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "unknown_role"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "unknown_role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "unknown_role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "invalid_type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "text": "x"}]}]},
        "messages[0].content[0]",
        "content_part_without_text",
    ),
    ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages[0].name", "invalid_type"),
    ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight", "unknown_field"),
    (
        {"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
        "unsupported_field",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "partial": True}]},
        "messages[0].partial",
        "unsupported_field",
    ),
    (
        {"messages": [{"role": "assistant", "reasoning_content": ["x"]}]},
        "messages[0].reasoning_content",
        "invalid_type",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls", "invalid_type"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]", "invalid_type"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        "messages[0].tool_calls[0].function.name",
        "invalid_type",
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
        "messages[1].tool_calls[0].function.arguments",
        "tool_arguments_not_object",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 7}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "tool_arguments_wrong_type",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "tool_name_unresolvable"),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
                {"role": "tool", "tool_call_id": "b", "content": "x"},
            ]
        },
        "messages[1].tool_call_id",
        "tool_name_unresolvable",
    ),
    (body(tool_choice="any"), "tool_choice", "invalid_tool_choice"),
    (body(tool_choice="required"), "tool_choice", "no_tools"),
    (body(tools=[WEATHER], tool_choice={"type": "function"}), "tool_choice", "invalid_tool_choice"),
    (
        body(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice.function.name",
        "unknown_tool",
    ),
    (body(response_format="json"), "response_format", "invalid_type"),
    (body(response_format={"type": "xml"}), "response_format.type", "unsupported_response_format"),
    (body(response_format={"type": "json_schema"}), "response_format.json_schema", "invalid_type"),
    (
        body(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}),
        "response_format.json_schema.schema",
        "invalid_type",
    ),
    (body(reasoning_effort=0.5), "reasoning_effort", "unsupported_reasoning_effort"),
    (body(reasoning_effort="turbo"), "reasoning_effort", "unsupported_reasoning_effort"),
    (body(thinking="yes"), "thinking", "invalid_type"),
    (body(thinking={"type": "adaptive"}), "thinking.type", "invalid_thinking"),
    (body(thinking={"type": "enabled", "keep": "last"}), "thinking.keep", "invalid_thinking"),
    (body(thinking={"type": "enabled", "effort": "huge"}), "thinking.effort", "unsupported_reasoning_effort"),
    (body(thinking={"type": "enabled", "budget_tokens": 5}), "thinking.budget_tokens", "unknown_field"),
    (body(parallel_tool_calls="no"), "parallel_tool_calls", "invalid_type"),
]


@pytest.mark.parametrize(
    ("request_", "param", "code"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_refusals_name_the_field(request_: dict[str, Any], param: str, code: str) -> None:
    error = refusal(request_)
    assert (error.param, error.code) == (param, code)
    assert str(error).startswith(f"{param}: ")
    assert len(error.message) < 400


# Each is put where tools are declared: at the top and in a system message.
BAD_TOOLS: list[tuple[Any, str, str]] = [
    ("x", "", "invalid_type"),
    ({"a": 1}, "", "invalid_type"),
    (5, "", "invalid_type"),
    (["x"], "[0]", "invalid_type"),
    ([None], "[0]", "invalid_type"),
    ([{}], "[0].type", "unsupported_tool_type"),
    ([{"type": "web"}], "[0].type", "unsupported_tool_type"),
    ([{"type": "builtin_function", "function": {"name": "$web"}}], "[0].type", "unsupported_tool_type"),
    ([{"type": "function"}], "[0].function", "invalid_type"),
    ([{"type": "function", "function": "f"}], "[0].function", "invalid_type"),
    ([{"type": "function", "function": {}}], "[0].function.name", "invalid_tool_name"),
    ([tool(name=None)], "[0].function.name", "invalid_tool_name"),
    ([tool(name=7)], "[0].function.name", "invalid_tool_name"),
    ([tool(name="")], "[0].function.name", "invalid_tool_name"),
    ([tool(name="1abc")], "[0].function.name", "invalid_tool_name"),
    ([tool(name="a" * 300)], "[0].function.name", "invalid_tool_name"),
    ([tool(name="a b")], "[0].function.name", "invalid_tool_name"),
    ([tool(name='a"b')], "[0].function.name", "invalid_tool_name"),
    ([tool(name="工具")], "[0].function.name", "invalid_tool_name"),
    ([tool(name="f\n")], "[0].function.name", "invalid_tool_name"),
    ([tool(description=5)], "[0].function.description", "invalid_type"),
    ([tool(strict="yes")], "[0].function.strict", "invalid_type"),
    ([tool(parameters="x")], "[0].function.parameters", "invalid_type"),
    ([tool(parameters=[])], "[0].function.parameters", "invalid_type"),
    ([tool(parameters={"type": "string"})], "[0].function.parameters.type", "invalid_schema"),
    ([tool(parameters={"properties": []})], "[0].function.parameters.properties", "invalid_type"),
    ([tool(parameters={"required": "a"})], "[0].function.parameters.required", "invalid_type"),
    ([tool(parameters={"required": [1]})], "[0].function.parameters.required", "invalid_type"),
    ([tool(), tool()], "[1].function.name", "duplicate_tool"),
]


class TestB32DeclaredTools:
    @pytest.mark.parametrize(("tools", "where", "code"), BAD_TOOLS)
    def test_b32_malformed_tools_are_refused_at_the_top(self, tools: Any, where: str, code: str) -> None:
        error = refusal(body(tools=tools))
        assert (error.param, error.code) == (f"tools{where}", code)

    @pytest.mark.parametrize(("tools", "where", "code"), BAD_TOOLS)
    def test_b32_and_in_a_system_message(self, tools: Any, where: str, code: str) -> None:
        error = refusal({"messages": [USER, {"role": "system", "tools": tools}]})
        assert (error.param, error.code) == (f"messages[1].tools{where}", code)

    @pytest.mark.parametrize("role", ["user", "assistant", "tool"])
    def test_b32_only_system_messages_declare_tools(self, role: str) -> None:
        error = refusal({"messages": [{"role": role, "content": "x", "name": "f", "tools": [WEATHER]}]})
        assert (error.param, error.code) == ("messages[0].tools", "tools_on_wrong_role")

    @pytest.mark.parametrize("content", ["text", [{"type": "text", "text": "x"}]])
    def test_b32_a_message_that_declares_tools_has_no_content(self, content: Any) -> None:
        error = refusal({"messages": [{"role": "system", "content": content, "tools": [WEATHER]}]})
        assert (error.param, error.code) == ("messages[0].content", "content_beside_tools")

    def test_b32_names_are_unique_across_the_request_and_all_messages(self) -> None:
        error = refusal({"messages": [{"role": "system", "tools": [WEATHER]}], "tools": [WEATHER]})
        assert (error.param, error.code) == ("messages[0].tools[0].function.name", "duplicate_tool")

    def test_b32_dynamic_tools_are_rendered_in_place_and_can_be_chosen(self) -> None:
        request = {
            "messages": [USER, {"role": "system", "tools": [WEATHER]}],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        }
        text = prompt(request)
        assert text.index("hi") < text.index("## New Tools Available") < text.index('"get_weather"')
        assert parse_request(request).tool_choice == NamedTool("get_weather")

    def test_b32_deep_nesting_is_refused_or_rendered_but_never_crashes(self) -> None:
        schema: dict[str, Any] = {}
        for _ in range(100_000):
            schema = {"items": schema}
        assert refusal(body(tools=[tool(parameters=schema)])).code == "invalid_json"
        assert (
            refusal(body(response_format={"type": "json_schema", "json_schema": {"schema": schema}})).code
            == "invalid_json"
        )


class TestB33SchemasInTheWild:
    @pytest.mark.parametrize(
        "parameters",
        [
            {"type": "object", "properties": {"a": {"$ref": "#/$defs/x", "description": "d"}}, "$defs": {"x": {}}},
            {"properties": {"a": {}}},
            {"type": "object", "properties": {"n": {"$ref": "#"}}},
            {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
            {"type": "object", "properties": {"a": {"enum": ["x", 1, None]}}},
            {"type": ["object", "null"]},
            {},
            None,
        ],
    )
    def test_b33_they_are_rendered_verbatim_with_sorted_keys(self, parameters: Any) -> None:
        declared = tool(parameters=parameters)
        expected = json.dumps([declared], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        assert f"```json\n{expected}\n```" in prompt(body(tools=[declared]))

    def test_b33_missing_parameters_are_fine(self) -> None:
        assert '[{"function":{"name":"f"},"type":"function"}]' in prompt(body(tools=[tool()]))

    def test_b33_messages_a_server_produced_are_accepted_back(self) -> None:
        echo = {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "provider_specific_fields": {"x": 1},
            "reasoning_content": "r",
            "tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}],
        }
        text = prompt({"messages": [USER, echo, {"role": "tool", "tool_call_id": "a"}]})
        assert 'message role="tool" tool="f" index="1"' in text

    def test_b33_names_of_participants_are_escaped_attributes(self) -> None:
        messages = [{"role": role, "name": 'A & "B"', "content": "x"} for role in ("system", "user", "assistant")]
        text = prompt({"messages": messages})
        for role in ("system", "user", "assistant"):
            assert f'<|open|>message role="{role}" name="A &amp; &quot;B&quot;"<|sep|>' in text

    @pytest.mark.parametrize("content", ["", None, []])
    def test_b33_a_turn_of_calls_needs_no_content_and_a_result_none_either(self, content: Any) -> None:
        calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        turn = {"role": "assistant", "content": content, "tool_calls": calls}
        text = prompt({"messages": [USER, turn, {"role": "tool", "tool_call_id": "a", "content": content}]})
        assert "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>" in text

    def test_b33_the_request_is_not_changed(self) -> None:
        request = body(tools=[WEATHER], response_format={"type": "json_object"}, thinking={"type": "enabled"})
        before = copy.deepcopy(request)
        prompt(request)
        assert request == before


class TestB20Case20Thinking:
    @pytest.mark.parametrize(
        "fields", [{"thinking": {"type": "disabled"}}, {"thinking": False}, {"reasoning_effort": "none"}]
    )
    def test_b20_case20_thinking_off_opens_the_response_and_gives_no_directive(self, fields: dict[str, Any]) -> None:
        text = prompt(body(**fields))
        assert text.endswith('<|open|>message role="assistant"<|sep|><|open|>response<|sep|>')
        assert "thinking_effort" not in text

    @pytest.mark.parametrize(
        ("fields", "tier"),
        [
            ({}, "max"),
            ({"reasoning_effort": None, "thinking": None}, "max"),
            ({"reasoning_effort": "low"}, "low"),
            ({"reasoning_effort": "minimal"}, "low"),
            ({"reasoning_effort": "medium"}, "high"),
            ({"reasoning_effort": "xhigh"}, "max"),
            ({"thinking": {"type": "enabled", "effort": "low"}, "reasoning_effort": "max"}, "low"),
            ({"thinking": {"type": "enabled", "effort": "high", "keep": "all"}}, "high"),
            ({"thinking": True, "reasoning_effort": "high"}, "high"),
        ],
    )
    def test_b20_case20_effort_goes_to_k3s_tiers(self, fields: dict[str, Any], tier: str) -> None:
        assert f"`thinking_effort={tier}`" in prompt(body(**fields))


class TestCase17SplitTurns:
    def test_case17_prose_and_calls_in_two_messages_become_one_turn(self) -> None:
        calls = [{"id": "c0", "function": {"name": "f", "arguments": "{}"}}]
        request = {
            "messages": [
                USER,
                {"role": "assistant", "content": "let me look", "reasoning_content": "r"},
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": "c0", "content": "x"},
            ]
        }
        parsed = parse_request(request)
        assert [message.role for message in parsed.messages] == ["user", "assistant", "tool"]
        assert (parsed.messages[1].content, parsed.messages[1].tool_calls) == (
            "let me look",
            (ToolCall("c0", "f", "{}"),),
        )

    def test_case17_two_separate_turns_stay_apart(self) -> None:
        request = {"messages": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]}
        assert len(parse_request(request).messages) == 2


class TestToolResults:
    CALLS = [{"id": i, "function": {"name": n, "arguments": "{}"}} for i, n in (("x", "f"), ("y", "g"), ("x", "h"))]

    def names(self, *results: dict[str, Any]) -> list[str]:
        request = {"messages": [{"role": "assistant", "tool_calls": self.CALLS}, *results]}
        text = prompt(request)
        return [
            part.split('"')[0] + part.split("<|sep|>")[1].split("<|close|>")[0]
            for part in text.split('role="tool" tool="')[1:]
        ]

    def test_results_come_in_the_order_of_the_calls_and_shared_ids_are_answered_in_turn(self) -> None:
        results = [{"role": "tool", "tool_call_id": i, "content": c} for i, c in (("y", "2"), ("x", "1"), ("x", "3"))]
        assert self.names(*results) == ["f1", "g2", "h3"]

    def test_a_matched_result_is_never_given_another_tools_name(self) -> None:
        results = [
            {"role": "tool", "tool_call_id": "y", "content": "2"},
            {"role": "tool", "tool_call_id": "gone", "name": "old", "content": "0"},
        ]
        assert self.names(*results) == ["g2", "old0"]

    def test_results_without_ids_answer_by_position(self) -> None:
        assert self.names({"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}) == ["f1", "g2"]


def test_the_prompt_fields_are_all_that_is_read() -> None:
    assert {
        "messages", "tools", "tool_choice", "response_format", "reasoning_effort", "thinking", "parallel_tool_calls"
    } == PROMPT_FIELDS  # fmt: skip


def test_the_developer_role_is_system() -> None:
    assert 'role="system"<|sep|>be brief' in prompt({"messages": [{"role": "developer", "content": "be brief"}]})


def test_reasoning_is_accepted_under_both_names() -> None:
    for key in ("reasoning_content", "reasoning"):
        text = prompt({"messages": [{"role": "assistant", "content": "b", key: "thought"}]})
        assert "<|open|>think<|sep|>thought<|close|>think<|sep|>" in text


def test_a_result_without_an_id_is_not_named_by_its_place_beside_others_that_have_one() -> None:
    calls = [{"id": f"c{name}", "function": {"name": name, "arguments": "{}"}} for name in ("f", "g")]
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    nameless = {"role": "tool", "content": "of f"}
    for between in ([], [{"role": "user", "content": "wait"}]):
        messages = [*asked, {"role": "tool", "tool_call_id": "cg", "content": "of g"}, *between, nameless]
        with pytest.raises(ChatRequestError) as refused:
            parse_request({"messages": messages})
        assert refused.value.param == f"messages[{len(messages) - 1}].tool_call_id"
    assert parse_request({"messages": [*asked, nameless, nameless]})


def test_only_a_tool_message_has_its_name_under_tool() -> None:
    for tool in ("x", {"any": "thing"}):
        (message,) = parse_request({"messages": [{"role": "assistant", "content": "x", "tool": tool}]}).messages
        assert message.name is None
