"""The arguments of calls under a turn grammar: their schemas, their names, and schemas that it loosens."""

import json
from typing import Any

import pytest

from k3_sglang.chat.encode import encode
from k3_sglang.chat.grammar import turn_grammar
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.types import ChatRequest, Message, ToolCall
from tests.chat.grammar_engine import Engine
from tests.chat.grammar_turns import SCHEMAS, argument, asks, call, tool_of, turn


@pytest.mark.parametrize("case", SCHEMAS, ids=lambda case: json.dumps(case["schema"])[:40])
def test_arguments_follow_their_schema(engine: Engine, case: dict[str, Any]) -> None:
    request = asks(tools=[tool_of(case["schema"])], tool_choice="required")
    for kind, value in case["legal"]:
        assert engine.accepts(engine.matcher(request), turn(call("f", argument("v", kind, value)))), (kind, value)
    for kind, value in case["illegal"]:
        assert not engine.accepts(engine.matcher(request), turn(call("f", argument("v", kind, value)))), (kind, value)


class TestB22UndeclaredArgumentsNeverUseADeclaredName:
    PARAMETERS = {
        "type": "object",
        "properties": {"data": {"type": "integer"}},
        "additionalProperties": {
            "type": "object",
            "properties": {"data": {"type": "string"}},
            "additionalProperties": True,
        },
    }

    def test_b22_at_the_top_level_of_a_tool(self, accepts) -> None:
        request = asks(
            tools=[{"type": "function", "function": {"name": "f", "parameters": self.PARAMETERS}}],
            tool_choice="required",
        )
        data, extra = argument("data", "number", "1"), argument("x", "object", '{"data": "s"}')
        assert accepts(request, turn(call("f", data, extra)))
        assert accepts(request, turn(call("f", argument("dat", "object", "{}"))))
        assert not accepts(request, turn(call("f", argument("data", "object", '{"data": "s"}'))))
        assert not accepts(request, turn(call("f", data, argument("data", "object", "{}"))))


class TestNamesInAttributes:
    @pytest.mark.parametrize("key", ["资料", 'a"b', "a&b", "&quot;", "with space", "<|sep|>"])
    def test_case19_keys_are_escaped_as_the_encoder_does(self, engine: Engine, key: str) -> None:
        request = asks(tools=[tool_of({"type": "string"}, key=key)], tool_choice="required")
        spoken = Message("assistant", "", None, (ToolCall("", "f", json.dumps({key: "x"})),))
        prompt = encode(ChatRequest((), effort=None), engine.tokenizer).ids
        whole = encode(ChatRequest((spoken,), effort=None, add_generation_prompt=False), engine.tokenizer).ids
        matcher = engine.matcher(request)
        assert all(matcher.accept_token(token) for token in whole[len(prompt) :])
        assert matcher.is_terminated()


class TestLoosening:
    @pytest.mark.parametrize(
        ("schema", "note"),
        [
            ({"type": "string", "pattern": "^a+$"}, "pattern"),
            ({"type": "array", "uniqueItems": True}, "uniqueItems"),
            ({"not": {"type": "string"}}, "not"),
            ({"$ref": "#/$defs/missing"}, "$ref #/$defs/missing"),
            ({"$ref": "http://example.org/schema"}, "$ref http://example.org/schema"),
            ({"type": "number", "minimum": 0.5}, "range of a non-integer number"),
            ({"type": "colour"}, "type 'colour'"),
            ({"enum": []}, "no value allowed"),
            (False, "no value allowed"),
            ({"type": "integer", "minimum": 5, "maximum": 1}, "empty range"),
            ({"type": "string", "minLength": 5, "maxLength": 1}, "minLength over maxLength"),
            ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "type given twice"),
            ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
            ({"type": "string", "minLength": 1, "maxLength": 17}, "maxLength 17"),
            ({"type": "array", "items": {"type": "string", "minLength": 17}}, "minLength 17"),
            ({"enum": ["a", "b"], "type": "integer"}, "no value allowed"),
            ({"const": 1, "minimum": 2}, "no value allowed"),
            ({"enum": ["a", "b"], "pattern": "^a$"}, "pattern"),
            ({"allOf": [{"$ref": "#/$defs/gone", "type": "string"}]}, "$ref #/$defs/gone"),
            (
                {"properties": {"a": {}}, "additionalProperties": False, "allOf": [{"properties": {"b": {}}}]},
                "additionalProperties beside properties of another schema",
            ),
        ],
    )
    def test_what_cannot_be_said_loosens_one_argument_and_is_named(self, engine: Engine, schema, note) -> None:
        request = parse_request(asks(tools=[tool_of(schema)], tool_choice="required"))
        grammar = turn_grammar(request, "think")
        assert grammar is not None
        assert grammar.loosened == (f"f: {note}",)
        engine.matcher(request)

    def test_exact_schemas_are_not_reported(self) -> None:
        for case in SCHEMAS:
            request = parse_request(asks(tools=[tool_of(case["schema"])], tool_choice="required"))
            grammar = turn_grammar(request, "think")
            assert grammar is not None
            assert grammar.loosened == ()

    def test_bottomless_schemas_are_refused_not_crashed_on(self) -> None:
        schema: dict[str, Any] = {}
        for _ in range(400):
            schema = {"type": "array", "items": schema}
        request = parse_request(asks(tools=[tool_of(schema)], tool_choice="required"))
        with pytest.raises(ValueError, match="nested too deeply"):
            turn_grammar(request, "think")


def test_undeclared_names_may_begin_like_declared_ones(accepts) -> None:
    parameters = {"type": "object", "properties": {"名": {"type": "string"}}, "additionalProperties": True}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for key in ("先", "地", "名前", "x"):
        assert accepts(asks(tools=[tool], tool_choice="required"), turn(call("f", argument(key, "string", "x"))))
