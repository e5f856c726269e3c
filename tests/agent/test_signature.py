"""Typed functions become strict schemas, and arguments are checked before anything runs."""

import json
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from agent_runtime.tools.registry import Tool, ToolDefinitionError, tool
from agent_runtime.tools.result import Failure, ToolResult


class Point(BaseModel):
    model_config = ConfigDict(extra="forbid")
    x: int
    y: int = 0


class Leaky(BaseModel):
    x: int


@tool
def plot(
    point: Point,
    copy: Annotated[int, Field(ge=1, le=3, description="How many copies.")],
    colour: Literal["red", "blue"] = "red",
    labels: dict[str, str] | None = None,
) -> str:
    """Draw a point.

    A second paragraph
    on two lines.

    Args:
        point: Where it goes,
            in pixels.
        colour: Its colour.
        labels: Texts beside it.

    Returns:
        For programmers only.
    """
    return f"{point.x},{point.y} {copy} {colour} {labels}"


@tool
def now() -> str:
    """The time."""
    return "12:00"


GOOD = '{"point": {"x": 1}, "copy": 2}'


def failure(made: Tool, arguments: str) -> ToolResult:
    result = made.signature.check(arguments)
    assert isinstance(result, ToolResult), f"{arguments!r} was accepted as {result}"
    return result


def test_the_schema_says_everything_the_function_says() -> None:
    schema = plot.schema["function"]
    assert schema["name"] == "plot"
    assert schema["description"] == "Draw a point.\n\nA second paragraph on two lines."
    properties = schema["parameters"]["properties"]
    assert list(properties) == ["point", "copy", "colour", "labels"]
    assert properties["point"]["description"] == "Where it goes, in pixels."
    assert properties["copy"] == {
        "description": "How many copies.",
        "maximum": 3,
        "minimum": 1,
        "type": "integer",
    }
    assert properties["colour"]["enum"] == ["red", "blue"]
    assert schema["parameters"]["required"] == ["point", "copy"]


def test_every_object_in_the_schema_is_closed() -> None:
    schema = plot.schema["function"]["parameters"]
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Point"]["additionalProperties"] is False
    assert "title" not in json.dumps(schema)


def test_a_tool_without_parameters_has_an_empty_closed_schema() -> None:
    assert now.schema["function"]["parameters"] == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


def test_good_arguments_become_python_values() -> None:
    values = plot.signature.check(GOOD)
    assert values == {"point": Point(x=1), "copy": 2, "colour": "red", "labels": None}
    assert isinstance(values, dict) and plot(**values) == "1,0 2 red None"


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        pytest.param("", Failure.BAD_JSON, "not a valid JSON object", id="empty"),
        pytest.param('{"copy": 2, "point": {"x"', Failure.BAD_JSON, "line 1 column", id="truncated"),
        pytest.param(GOOD + GOOD, Failure.BAD_JSON, "Extra data", id="two-objects"),
        pytest.param("[1]", Failure.BAD_JSON, "it is a JSON array", id="array"),
        pytest.param("true", Failure.BAD_JSON, "it is a JSON boolean", id="boolean"),
        pytest.param("null", Failure.BAD_JSON, "it is a JSON null", id="null"),
        pytest.param('"text"', Failure.BAD_JSON, "it is a JSON string", id="string"),
        pytest.param("{'copy': 2}", Failure.BAD_JSON, "double quotes", id="python-literal"),
        pytest.param('{"copy": 1, "copy": 2}', Failure.BAD_JSON, "'copy' occurs twice", id="repeated-key"),
        pytest.param('{"copy": NaN}', Failure.BAD_JSON, "NaN is not JSON", id="nan"),
        pytest.param('{"a": "\\ud800"}', Failure.BAD_JSON, "escape", id="lone-surrogate"),
        pytest.param("[" * 100_000, Failure.BAD_JSON, "nested too deeply", id="deep-nesting"),
        pytest.param("{}", Failure.INVALID_ARGUMENTS, "point: required, but missing", id="missing"),
        pytest.param(
            '{"point": {"x": 1}, "copy": 2, "size": 1}',
            Failure.INVALID_ARGUMENTS,
            "size: no such parameter",
            id="unknown-parameter",
        ),
        pytest.param(
            '{"point": {"x": 1, "z": 1}, "copy": 2}',
            Failure.INVALID_ARGUMENTS,
            "point.z: no such parameter",
            id="unknown-nested-key",
        ),
        pytest.param(
            '{"point": {"x": 1}, "copy": "2"}', Failure.INVALID_ARGUMENTS, "received '2'", id="number-as-text"
        ),
        pytest.param(
            '{"point": {"x": 1}, "copy": true}',
            Failure.INVALID_ARGUMENTS,
            "copy: Input should be a valid integer",
            id="boolean-as-number",
        ),
        pytest.param(
            '{"point": {"x": 1}, "copy": 9}',
            Failure.INVALID_ARGUMENTS,
            "copy: Input should be less than or equal to 3; received 9",
            id="out-of-range",
        ),
        pytest.param(
            '{"point": {"x": 1}, "copy": 2, "colour": "green"}',
            Failure.INVALID_ARGUMENTS,
            "colour: Input should be 'red' or 'blue'",
            id="not-in-enum",
        ),
        pytest.param(
            '{"point": "{\\"x\\": 1}", "copy": 2}',
            Failure.INVALID_ARGUMENTS,
            "point: Input should be an object",
            id="object-as-text",
        ),
        pytest.param('{"point": {"x": 1}, "copy": null}', Failure.INVALID_ARGUMENTS, "received None", id="null-value"),
    ],
)
def test_malformed_arguments_are_named_to_the_model(arguments: str, kind: Failure, words: str) -> None:
    result = failure(plot, arguments)
    assert result.failure is kind
    assert words in result.model
    assert "was not run" in result.model and "Expected: {point: " in result.model
    assert "\n" not in result.user
    assert arguments[:50] in result.debug.replace("\\\\", "\\") or repr(arguments)[:50] in result.debug
    assert len(result.model) < 600, "long arguments must not be sent back whole"


def test_a_tool_without_parameters_says_that_it_takes_none() -> None:
    assert now.signature.check("{}") == {}
    assert "takes no arguments" in failure(now, '{"zone": "UTC"}').model


@given(st.text())
def test_no_text_whatever_raises(text: str) -> None:
    result = plot.signature.check(text)
    assert isinstance(result, ToolResult)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_no_json_value_whatever_raises(value: Any) -> None:
    result = plot.signature.check(json.dumps({"point": {"x": 1}, "copy": value}))
    if isinstance(result, dict):
        assert value in (1, 2, 3) and isinstance(value, int)
    else:
        result.model.encode("utf-8")


def no_docstring(x: int) -> int:
    return x


def no_parameter_text(x: int) -> int:
    """Does it."""
    return x


def no_type(x) -> int:
    """Does it.

    Args:
        x: A number.
    """
    return x


def many(*x: int) -> int:
    """Does it."""
    return len(x)


def leaky(x: Leaky) -> int:
    """Does it.

    Args:
        x: A thing.
    """
    return x.x


def stale(x: int) -> int:
    """Does it.

    Args:
        x: A number.
        y: Left over from an earlier version.
    """
    return x


class Opaque:
    """A type that no JSON value stands for."""


def odd(x: Opaque) -> str:
    """Does it.

    Args:
        x: A thing.
    """
    return str(x)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_docstring, "has no description: give the function a docstring"),
        (no_parameter_text, "parameter 'x' has no description; add it under 'Args:'"),
        (no_type, "parameter 'x' has no type annotation"),
        (many, "parameter 'x' is variadic positional"),
        (leaky, r"accepts unknown keys; give its model ConfigDict\(extra='forbid'\)"),
        (stale, r"the docstring describes \['y'\], which are not parameters"),
        (odd, "tool 'odd': "),
    ],
)
def test_a_function_the_model_could_not_use_is_refused_when_it_is_defined(function: Any, words: str) -> None:
    with pytest.raises(ToolDefinitionError, match=words):
        tool(function)


def test_a_name_that_no_endpoint_accepts_is_refused() -> None:
    with pytest.raises(ToolDefinitionError, match="tool name '1 bad' is not allowed"):
        tool(name="1 bad")(now.function)
