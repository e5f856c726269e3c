"""Schemas that are wrong, huge or endless loosen the grammar with a note; building it never crashes or hangs."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.grammar import TurnGrammar, turn_grammar
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer

USER = {"role": "user", "content": "hi"}


def asks(schema: Any, **fields: Any) -> dict[str, Any]:
    """A request whose answer has the schema, and whose tool has an argument of it."""
    parameters = {"type": "object", "properties": {"v": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": [USER], "tools": [tool], "response_format": wanted, **fields}


def grammar_of(schema: Any, *, force: bool = False) -> TurnGrammar:
    grammar = turn_grammar(parse_request(asks(schema)), "think", force=force)
    assert grammar is not None
    return grammar


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"type": {}}, "unusable type"),
    ({"type": [{}], "enum": [1]}, "unusable type"),
    ({"type": "object", "required": 5}, "unusable required"),
    ({"required": "ab", "allOf": [{"required": ["c"]}]}, "unusable required"),
    ({"required": ["a"], "allOf": [{"required": [{}]}]}, "unusable required"),
    ({"properties": 5, "allOf": [{"properties": {"a": True}}]}, "unusable properties"),
    ({"type": "integer", "minimum": 10**400}, "unusable minimum"),
    ({"type": "integer", "maximum": -(10**4200)}, "unusable maximum"),
    ({"type": "number", "exclusiveMinimum": True}, "unusable exclusiveMinimum"),
    ({"type": "string", "maxLength": 3 * 10**9}, "unusable maxLength"),
    ({"type": "string", "minLength": -1}, "unusable minLength"),
    ({"type": "array", "minItems": "2"}, "unusable minItems"),
    ({"type": "array", "items": 5}, "unusable items"),
    ({"enum": {"a": 1}}, "unusable enum"),
    ({"anyOf": []}, "unusable anyOf"),
    ({"anyOf": {"type": "string"}}, "unusable anyOf"),
    ({"allOf": 5}, "unusable allOf"),
    ({"allOf": [{"required": 5}, {"required": ["a"]}]}, "unusable required"),
    ({"allOf": [5, {"type": "string"}]}, "not a schema"),
    ({"allOf": [False, {"type": "string"}]}, "no value allowed"),
    ({"$ref": ["a"]}, "unusable $ref"),
    ({"$ref": "#/allOf/²", "allOf": [{}]}, "$ref #/allOf/²"),
    ({"$ref": f"#/allOf/{'9' * 5000}", "allOf": [{}]}, f"$ref #/allOf/{'9' * 5000}"),
]


@pytest.mark.parametrize(("schema", "note"), WRONG, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("force", [False, True])
def test_a_keyword_with_an_unusable_value_loosens_and_is_named(
    toy: K3Tokenizer, schema: dict[str, Any], note: str, force: bool
) -> None:
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar comes with the serve extra")
    grammar = grammar_of(schema, force=force)
    assert f"response_format: {note}" in grammar.loosened
    vocabulary = xgrammar.TokenizerInfo(
        toy.grammar_vocabulary(), xgrammar.VocabType.RAW, stop_token_ids=[toy.special.end_of_msg]
    )
    xgrammar.GrammarCompiler(vocabulary, max_threads=1).compile_structural_tag(grammar.constraint()["structural_tag"])


@pytest.mark.parametrize("leaf", [{"type": "string"}, False, {"enum": [1, 2]}], ids=["string", "nothing", "enum"])
def test_alternatives_that_double_at_every_level_are_given_up(leaf: Any) -> None:
    levels: dict[str, Any] = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}
    grammar = grammar_of({"$defs": {**levels, "a40": leaf}, "$ref": "#/$defs/a0"})
    assert "response_format: schema too large" in grammar.loosened
    assert len(grammar.ebnf) < 1_000_000


def test_all_schemas_of_a_request_share_one_budget() -> None:
    levels: dict[str, Any] = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(13)}
    heavy = {"type": "object", "properties": {"v": {"$ref": "#/$defs/a0"}}, "$defs": {**levels, "a13": False}}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": heavy, "strict": True}} for i in range(50)
    ]
    grammar = turn_grammar(parse_request({"messages": [USER], "tools": tools}), "think")
    assert grammar is not None
    assert sum(note.endswith("schema too large") for note in grammar.loosened) > 40


def test_an_enum_beyond_the_budget_loosens_and_never_narrows() -> None:
    grammar = grammar_of({"enum": list(range(100_000))})
    assert "response_format: schema too large" in grammar.loosened
    assert '"null"' in grammar.ebnf


def test_one_of_beside_any_of_counts_too() -> None:
    schema = {
        "anyOf": [{"type": "string"}, {"type": "integer"}],
        "oneOf": [{"maxLength": 3}, {"maxLength": 5}],
    }
    grammar = grammar_of(schema, force=True)
    assert grammar.loosened == ("f: oneOf", "response_format: oneOf")
    assert "{0,3}" in grammar.ebnf and "{0,5}" in grammar.ebnf


def test_string_lengths_are_counted_up_to_a_limit_of_each_and_of_all() -> None:
    """Each counted character takes the engine a pass over its whole vocabulary before it starts."""
    lengths = {f"p{low}_{high}": {"minLength": low, "maxLength": high} for low in range(9) for high in range(9, 17)}
    grammar = grammar_of({"properties": {**lengths, **{f"again_{name}": rule for name, rule in lengths.items()}}})
    assert any("Length" in note for note in grammar.loosened)
    assert grammar.ebnf.count("\nchars") < 100
    assert grammar_of({"properties": {f"p{i}": {"maxLength": 16} for i in range(200)}}).loosened == ()


KEYWORDS = (
    *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "properties", "required", "items", "prefixItems"),
    *("additionalProperties", "minItems", "maxItems", "minLength", "maxLength", "minimum", "exclusiveMaximum"),
    "multipleOf",
)
SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.just(10**400) | st.floats(allow_nan=False)
WORDS = st.sampled_from(["string", "object", "array", "integer", "null", "#", "#/$defs/a", "#/anyOf/0", ""])
ANYTHING = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS) | WORDS, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), ANYTHING, max_size=5), force=st.booleans())
def test_any_json_as_a_schema_gives_a_grammar_or_a_refusal(schema: dict[str, Any], force: bool) -> None:
    try:
        grammar = grammar_of(schema, force=force)
    except ChatRequestError:
        return
    assert json.loads(grammar.constraint()["structural_tag"])["format"]["grammar"] == grammar.ebnf


def test_without_parallel_calls_a_free_turn_has_at_most_one() -> None:
    """The field has its effect without any other contract too."""
    tool = {"type": "function", "function": {"name": "now"}}
    grammar = turn_grammar(parse_request({"messages": [USER], "tools": [tool], "parallel_tool_calls": False}), "think")
    assert grammar is not None and "(tools" in grammar.ebnf and 'index=\\"2' not in grammar.ebnf
    assert turn_grammar(parse_request({"messages": [USER], "parallel_tool_calls": False}), "think") is None


def test_values_listed_beside_a_heavy_rule_share_the_budget() -> None:
    levels: dict[str, Any] = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}
    defs = {**levels, "a40": False}
    schema = {"$defs": defs, "enum": list(range(1000)), "not": {"$ref": "#/$defs/a0"}}
    assert any("enum beside what cannot be decided" in note for note in grammar_of(schema).loosened)


def test_patterns_beside_listed_values_cost_of_the_budget_too() -> None:
    schema = {"enum": ["x" * 160 + str(place) for place in range(3000)], "pattern": "x*x*y"}
    assert any("enum beside what cannot be decided" in note for note in grammar_of(schema).loosened)


def test_listed_values_beyond_all_floats_are_no_fault_of_the_request() -> None:
    grammar = grammar_of({"enum": [10**400, 1, 2.5], "type": "integer"})
    assert grammar.loosened == () and "2.5" not in grammar.ebnf and "1" + "0" * 400 in grammar.ebnf


@pytest.mark.parametrize(
    ("schema", "note"),
    [
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "oneOf"),
        ({"oneOf": [{"properties": {}}, {"type": "null"}]}, "oneOf"),
        ({"oneOf": [{"const": 1}, {"enum": [1.0, 2]}]}, "oneOf"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "at least 3 items where at most 1 are allowed"),
        ({"type": "array", "items": False, "minItems": 1}, "at least 1 items where at most 0 are allowed"),
        ({"prefixItems": [True], "items": False, "minItems": 2}, "at least 2 items where at most 1 are allowed"),
        ({"required": ["a"], "additionalProperties": False}, "required properties that are not allowed"),
        (
            {"type": "array", "allOf": [{"prefixItems": [True]}, {"items": {"type": "string"}}]},
            "items beside prefixItems of another schema",
        ),
    ],
    ids=str,
)
def test_what_no_rule_says_is_named(schema: dict[str, Any], note: str) -> None:
    assert f"response_format: {note}" in grammar_of(schema).loosened


@pytest.mark.parametrize(
    "alternatives",
    [
        [{"type": "string"}, {"type": ["number", "null"]}],
        [{"const": "a"}, {"enum": ["b", "c"]}],
        [{"type": "object", "properties": {"kind": {"const": k}}, "required": ["kind"]} for k in ("a", "b", "c")],
    ],
    ids=["types", "constants", "kinds"],
)
def test_alternatives_that_plainly_exclude_each_other_are_exact(alternatives: list[Any]) -> None:
    assert grammar_of({"oneOf": alternatives}).loosened == ()


@pytest.mark.parametrize("place", ["response", "tool"])
def test_a_schema_that_is_too_deep_is_refused_with_its_own_field(place: str) -> None:
    deep: Any = {}
    for _ in range(450):
        deep = {"items": deep}
    flat = {"type": "object", "properties": {"v": {"type": "string"}}}
    first = {"type": "function", "function": {"name": "f", "parameters": flat}}
    second = {"properties": {"v": deep}} if place == "tool" else flat
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": flat if place == "tool" else deep}}
    tools = [first, {"type": "function", "function": {"name": "g", "parameters": second}}]
    request = parse_request({"messages": [USER], "tools": tools, "response_format": wanted})
    with pytest.raises(ChatRequestError) as refused:
        turn_grammar(request, "think")
    assert (
        refused.value.param
        == {
            "response": "response_format.json_schema.schema",
            "tool": "tools[1].function.parameters",
        }[place]
    )


def test_names_as_long_as_allowed_are_no_depth() -> None:
    notes = grammar_of({"properties": {"n" * 5000: {"type": "string"}}, "additionalProperties": True}).loosened
    assert notes and all("256 characters" in note for note in notes)
    assert grammar_of({"properties": {"n" * 250: {"type": "string"}}, "additionalProperties": True}).loosened == ()
