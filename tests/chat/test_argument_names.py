"""Argument names: whatever a grammar lets the model write, the parser reads back; longer names are refused."""

import json
from typing import Any

import pytest

from k3_sglang.chat.encode import encode
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.grammar import turn_grammar
from k3_sglang.chat.parse import TurnParser
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tags import MAX_KEY_CHARS
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, Message, ToolCall

LONG = "k" * (MAX_KEY_CHARS + 1)


def asks(parameters: dict[str, Any]) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    return {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}


@pytest.mark.parametrize("char", ["k", '"', "&", "名", "\u2028"])
def test_the_longest_allowed_name_is_read_back_however_it_is_escaped(toy: K3Tokenizer, char: str) -> None:
    name = char * MAX_KEY_CHARS
    assert parse_request(asks({"properties": {name: {}}})).tools
    turn = Message("assistant", "", None, (ToolCall("", "f", json.dumps({name: True})),))
    prompt = encode(ChatRequest((), effort=None), toy).ids
    spoken = encode(ChatRequest((turn,), effort=None, add_generation_prompt=False), toy).ids[len(prompt) :]
    parser = TurnParser(toy, start="think")
    parser.feed(spoken)
    assert json.loads(parser.turn.calls[0].arguments) == {name: True}
    assert parser.turn.warnings == ()


@pytest.mark.parametrize(
    ("parameters", "field"),
    [({"properties": {LONG: {}}}, "properties"), ({"properties": {}, "required": ["a", LONG]}, "required")],
)
def test_a_longer_name_is_refused(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(ChatRequestError) as caught:
        parse_request(asks(parameters))
    assert (caught.value.param, caught.value.code) == (f"tools[0].function.parameters.{field}", "invalid_schema")
    assert str(MAX_KEY_CHARS) in caught.value.message
    assert len(str(caught.value)) < 400


def test_a_longer_name_behind_a_reference_loosens_the_grammar_and_is_left_out_of_it() -> None:
    behind = {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {LONG: {"type": "string"}, "a": {"type": "null"}}}}}
    grammar = turn_grammar(parse_request(asks(behind)), "think")
    assert grammar is not None
    assert grammar.loosened == (f"f: a property name of more than {MAX_KEY_CHARS} characters",)
    assert LONG not in grammar.ebnf


def test_a_long_undeclared_name_is_read_back(toy: K3Tokenizer) -> None:
    name = "k" * 16_000
    turn = Message("assistant", "", None, (ToolCall("", "f", json.dumps({name: None})),))
    prompt = encode(ChatRequest((), effort=None), toy).ids
    spoken = encode(ChatRequest((turn,), effort=None, add_generation_prompt=False), toy).ids[len(prompt) :]
    parser = TurnParser(toy, start="think")
    parser.feed(spoken)
    assert json.loads(parser.turn.calls[0].arguments) == {name: None}
