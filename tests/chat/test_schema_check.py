"""Values against schemas after decoding: equal to the reference validator, and never slow."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.chat.contract import contract_problems
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.schema_check import follows, schema_problem
from k3_sglang.chat.schema_patterns import pattern_matches
from k3_sglang.chat.types import ToolCall

NAMES = st.sampled_from(["a", "b", "名"])
SMALL = st.integers(0, 3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-4, 4) | st.sampled_from([1.0, 0.5, -2.5]) | st.text("ab1é", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
KINDS = st.sampled_from(["string", "number", "integer", "boolean", "null", "object", "array"])
PATTERNS = st.sampled_from(["^a", "b$", "^[ab]+$", "a|1", "é", "^a?b?$", "^.{2}$", "^a*b*$"])


def _keywords(schema: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(schema, min_size=1, max_size=3)
    members = st.dictionaries(NAMES, schema, max_size=3)
    known: dict[str, st.SearchStrategy[Any]] = {
        "type": KINDS | st.lists(KINDS, min_size=1, max_size=3, unique=True),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        **{key: st.integers(-3, 3) for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
        "multipleOf": st.sampled_from([1, 2, 0.5]),
        **{key: SMALL for key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")},
        "pattern": PATTERNS,
        "uniqueItems": st.booleans(),
        **{key: schema for key in ("items", "contains", "additionalProperties", "propertyNames", "not")},
        **{key: SMALL for key in ("minContains", "maxContains")},
        "prefixItems": several,
        **{key: members for key in ("properties", "dependentSchemas")},
        "patternProperties": st.dictionaries(PATTERNS, schema, max_size=2),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2),
        **{key: several for key in ("allOf", "anyOf", "oneOf")},
        **{key: schema for key in ("if", "then", "else")},
        "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y"]),
    }
    keys = st.lists(st.sampled_from(sorted(known)), max_size=3, unique=True)
    return keys.flatmap(lambda chosen: st.fixed_dictionaries({key: known[key] for key in chosen}))


SCHEMAS = st.recursive(st.booleans() | _keywords(st.booleans()), _keywords, max_leaves=4)
DEFS = {"x": {"type": ["string", "array"], "maxLength": 2}, "y": {"properties": {"a": {"$ref": "#/$defs/x"}}}}


@settings(deadline=None, max_examples=600)
@given(schema=SCHEMAS, value=VALUES)
def test_the_verdict_is_the_reference_validators(schema: Any, value: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema comes with the serve extra")
    document = {**schema, "$defs": DEFS} if isinstance(schema, dict) else schema
    expected = jsonschema.Draft202012Validator(document).is_valid(value)
    assert (schema_problem(value, document) is None) == expected
    assert follows(value, document, document) == expected


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        ({"properties": {"a": {"items": {"type": "null"}}}}, {"a": [None, "x"]}, "a[1]: got a string, expected null"),
        ({"type": "string", "pattern": "^[a-c]+$"}, "abd", 'value: "abd" does not match the pattern ^[a-c]+$'),
        ({"required": ["city"]}, {}, 'value: the property "city" is missing'),
        ({"minimum": 0.5}, 0.25, "value: 0.25 breaks minimum 0.5"),
        ({"uniqueItems": True}, [1, 2, 1.0], "value: an item occurs twice"),
        ({"not": {"type": "null"}}, None, "value: null follows the schema under `not`"),
        ({"multipleOf": 0.01}, 12.345, "value: 12.345 is no multiple of 0.01"),
        ({"multipleOf": 0.01}, 12.34, None),
        ({"pattern": "end$"}, "end\n", 'value: "end\\n" does not match the pattern end$'),
    ],
)
def test_a_problem_names_the_place_and_what_is_wrong(schema: Any, value: Any, problem: str | None) -> None:
    assert schema_problem(value, schema) == problem


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(a+)+$", "a" * 40 + "b"),
        ("(a|a)*$", "a" * 40 + "b"),
        ("a*a*a*a*a*a*$", "a" * 300 + "b"),
        ("a?" * 40 + "a" * 40, "a" * 39),
        ("(a|a)" * 40 + "b", "a" * 40),
        (r"(a)\1", "aa"),
        (r"\p{L}+", "é"),
        ("(", "a"),
        ("a" * 2000, "a"),
    ],
)
def test_a_pattern_that_could_take_long_or_reads_differently_here_is_not_decided(pattern: str, text: str) -> None:
    assert pattern_matches(pattern, text) is None
    assert schema_problem(text, {"pattern": pattern}) is None
    assert follows(text, {"not": {"pattern": pattern}}, {}) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "http://example.org/schema"},
        {"$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}, "$ref": "#/$defs/a0"},
    ],
    ids=["endless", "remote", "doubling"],
)
def test_what_cannot_be_worked_out_counts_as_followed(schema: dict[str, Any]) -> None:
    assert schema_problem({"x": 1}, schema) is None
    assert follows({"x": 1}, schema, schema) is None


class TestContract:
    ZIP = {"type": "string", "pattern": "^[0-9]{5}$"}
    PARAMETERS = {"properties": {"zip": ZIP, "n": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"multipleOf": 5}}}
    TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}

    def problems(self, content: str, *arguments: Any, **fields: Any) -> tuple[str, ...]:
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": [self.TOOL], **fields}
        calls = [ToolCall("c", "f", json.dumps(value)) for value in arguments]
        return contract_problems(parse_request(body), content, calls)

    def test_every_call_is_held_against_its_tools_schema(self) -> None:
        assert self.problems("", {"zip": "12345", "n": 10}) == ()
        assert self.problems("", {"zip": "12345"}, {"zip": "1234"}, {"n": 3}) == (
            'tool_calls[1].function.arguments: zip: "1234" does not match the pattern ^[0-9]{5}$',
            "tool_calls[2].function.arguments: n: 3 is no multiple of 5",
        )

    def test_a_final_answer_is_held_against_the_response_format_and_a_turn_with_calls_is_not(self) -> None:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"required": ["a"]}}}}
        assert self.problems("{}", response_format=wanted) == ()
        assert self.problems('{"a": 1}', response_format=wanted) == (
            'content: value: {"a":1} follows the schema under `not`',
        )
        assert self.problems("prose", response_format={"type": "json_object"}) == ("content: not JSON",)
        assert self.problems("", {"n": 5}, response_format={"type": "json_object"}) == ()

    def test_all_calls_of_a_turn_share_one_budget_of_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("k3_sglang.chat.contract.MAX_STEPS", 200)
        wrong = {"n": 3}
        assert len(self.problems("", wrong, wrong)) == 2
        assert len(self.problems("", {str(place): 1 for place in range(300)}, wrong)) == 0

    def test_a_problem_can_be_sent_whatever_the_model_spelled(self) -> None:
        (problem,) = self.problems("", {"zip": "\ud800"})
        assert problem.encode().decode() == problem and "\\ud800" in problem


@pytest.mark.parametrize("value", [10**400, float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("rule", [{"type": "integer"}, {"multipleOf": 5}, {"enum": [1]}, {"minimum": 3}], ids=str)
def test_numbers_beyond_all_floats_are_checked_like_others(value: float, rule: dict[str, Any]) -> None:
    followed = schema_problem(value, rule) is None
    assert followed == follows(value, rule, {})
    if value == 10**400:
        assert followed == ("enum" not in rule)
