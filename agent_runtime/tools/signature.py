"""A typed Python function → name, description, strict JSON schema and argument check."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agent_runtime.tools.result import Failure, ToolResult, one_line

JsonSchema = dict[str, Any]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_SECTION = re.compile(r"(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):\s*")
_PARAMETER = re.compile(r"(\w+)(?:\s*\([^)]*\))?:\s*(.*)")
# Keys of a JSON schema whose values are data and not schemas.
_DATA_KEYS = frozenset({"default", "examples", "const", "enum", "required"})


class ToolDefinitionError(TypeError):
    """A function cannot become a tool; the message names the function, what is missing and the remedy."""


class ToolSignature(Protocol):
    """What the model is told about a tool, and the check of what it sends back."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def parameters(self) -> JsonSchema: ...
    def check(self, arguments: str) -> dict[str, Any] | ToolResult:
        """Keyword arguments for the function, or the failure the model is told about."""
        ...


@dataclass(frozen=True, slots=True)
class Signature:
    """What the model is told about a function, and the check of what it sends back."""

    name: str
    description: str
    parameters: JsonSchema
    model: type[BaseModel]
    fields: tuple[tuple[str, str], ...]
    """Pairs of (parameter name, field name in `model`): a parameter may be called `copy`, a field may not."""

    def check(self, arguments: str) -> dict[str, Any] | ToolResult:
        """Keyword arguments for the function, or the failure the model is told about.

        Args:
            arguments: the JSON text of the call, exactly as the model wrote it. Checked strictly: `"5"` is
                no integer.
        """
        problem = json_problem(arguments)
        if problem is not None:
            return bad_json(self, arguments, problem)
        try:
            values = self.model.model_validate_json(arguments, strict=True)
        except ValidationError as error:
            details = error.errors(include_url=False)
            if details[0]["type"] == "json_invalid":
                return bad_json(self, arguments, str(details[0].get("ctx", {}).get("error", details[0]["msg"])))
            return invalid_arguments(self, arguments, [_error_line(detail) for detail in details])
        return {parameter: getattr(values, field) for parameter, field in self.fields}


def bad_json(signature: ToolSignature, arguments: str, problem: str) -> ToolResult:
    """The answer to arguments that are no JSON object."""
    return ToolResult(
        model=f"{signature.name} was not run: its arguments are not a valid JSON object ({problem}). "
        f"Received: {_shown(arguments)}. {_expected(signature)}",
        user=f"{signature.name}: arguments are not valid JSON",
        debug=f"arguments: {arguments!r}",
        failure=Failure.BAD_JSON,
    )


def invalid_arguments(signature: ToolSignature, arguments: str, problems: list[str]) -> ToolResult:
    """The answer to arguments that do not follow the schema."""
    lines = "\n".join(f"- {problem}" for problem in problems)
    return ToolResult(
        model=f"{signature.name} was not run: wrong arguments.\n{lines}\n{_expected(signature)}",
        user=f"{signature.name}: {problems[0]}",
        debug=f"arguments: {arguments!r}",
        failure=Failure.INVALID_ARGUMENTS,
    )


def _expected(signature: ToolSignature) -> str:
    properties: dict[str, JsonSchema] = signature.parameters.get("properties", {})
    if not properties:
        return "Expected: {} (this tool takes no arguments)."
    required: list[str] = signature.parameters.get("required", [])
    parts = [
        f"{name}: {schema.get('type', 'see the schema')}{'' if name in required else ', optional'}"
        for name, schema in properties.items()
    ]
    return "Expected: {" + "; ".join(parts) + "}."


def check_name(tool_name: str) -> None:
    """Raises ToolDefinitionError when an endpoint would refuse a tool of that name."""
    if not _NAME.fullmatch(tool_name):
        raise ToolDefinitionError(
            f"tool name {tool_name!r} is not allowed: use 1 to 64 letters, digits, '_' and '-', "
            "the first a letter or '_'"
        )


def read_signature(function: Callable[..., Any], *, name: str | None, description: str | None) -> Signature:
    """Derive a tool's face from a function.

    The description is the docstring up to its first section, a parameter's description is its
    `Field(description=…)` or its line under `Args:`. Every parameter needs a type and a description.

    Raises:
        ToolDefinitionError: the function has an unusable signature, or something the model needs to read is
            missing.
    """
    tool_name = name if name is not None else getattr(function, "__name__", "")
    check_name(tool_name)
    text, documented = _read_docstring(function)
    described = description if description is not None else text
    if not described:
        raise ToolDefinitionError(f"tool {tool_name!r} has no description: give the function a docstring")
    model, fields = _arguments_model(function, tool_name, documented)
    try:
        schema = cast(JsonSchema, _without_titles(model.model_json_schema()))
    except PydanticUserError as error:
        raise ToolDefinitionError(f"tool {tool_name!r}: {one_line(str(error))}") from error
    schema.setdefault("properties", {})
    _require_closed(schema, tool_name, at="")
    for parameter, _ in fields:
        if not schema["properties"][parameter].get("description"):
            raise ToolDefinitionError(
                f"tool {tool_name!r}: parameter {parameter!r} has no description; "
                "add it under 'Args:' in the docstring or with Annotated[..., Field(description=...)]"
            )
    return Signature(tool_name, described, schema, model, fields)


def _arguments_model(
    function: Callable[..., Any], tool_name: str, documented: dict[str, str]
) -> tuple[type[BaseModel], tuple[tuple[str, str], ...]]:
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(f"tool {tool_name!r}: {error}; annotations must be importable types") from error
    definitions: dict[str, Any] = {}
    fields: list[tuple[str, str]] = []
    for position, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolDefinitionError(
                f"tool {tool_name!r}: parameter {parameter.name!r} is {parameter.kind.description}; "
                "only named parameters can be put into a schema"
            )
        if parameter.name not in hints:
            raise ToolDefinitionError(f"tool {tool_name!r}: parameter {parameter.name!r} has no type annotation")
        hint = hints[parameter.name]
        extra: dict[str, Any] = {"alias": parameter.name}
        if not _has_description(hint) and parameter.name in documented:
            extra["description"] = documented[parameter.name]
        default = ... if parameter.default is parameter.empty else parameter.default
        field = f"p{position}"
        definitions[field] = (Annotated[hint, Field(**extra)], default)
        fields.append((parameter.name, field))
    unknown = sorted(set(documented) - {parameter for parameter, _ in fields})
    if unknown:
        raise ToolDefinitionError(f"tool {tool_name!r}: the docstring describes {unknown}, which are not parameters")
    try:
        model = create_model(
            f"{tool_name}_arguments", __config__=ConfigDict(extra="forbid", strict=True), **definitions
        )
    except PydanticUserError as error:
        raise ToolDefinitionError(f"tool {tool_name!r}: {one_line(str(error))}") from error
    return model, tuple(fields)


def _has_description(hint: Any) -> bool:
    if get_origin(hint) is not Annotated:
        return False
    return any(isinstance(extra, FieldInfo) and extra.description for extra in get_args(hint)[1:])


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The text before the first section with its paragraphs unfolded, and the descriptions under `Args:`."""
    head: list[str] = []
    documented: dict[str, str] = {}
    section, current = "", ""
    for line in (inspect.getdoc(function) or "").splitlines():
        found = _SECTION.fullmatch(line)
        if found:
            section = found.group(1)
        elif not section:
            head.append(line.strip())
        elif section in ("Args", "Arguments") and line.strip():
            entry = _PARAMETER.fullmatch(line.strip())
            indent = len(line) - len(line.lstrip())
            if entry and indent <= 4:
                current = entry.group(1)
                documented[current] = entry.group(2)
            elif current:
                documented[current] = f"{documented[current]} {line.strip()}".strip()
    paragraphs = "\n".join(head).strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs), documented


def _without_titles(schema: Any) -> Any:
    """Drop pydantic's generated titles: they repeat the names, and every byte here is in each prompt."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in cast(list[Any], schema)]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _DATA_KEYS else _without_titles(value)
        for key, value in cast(dict[str, Any], schema).items()
        if not (key == "title" and isinstance(value, str))
    }


def _require_closed(schema: Any, tool_name: str, *, at: str) -> None:
    """Refuse a nested object that lets unknown keys through: they would be dropped without a word."""
    if isinstance(schema, list):
        for item in cast(list[Any], schema):
            _require_closed(item, tool_name, at=at)
    elif isinstance(schema, dict):
        node = cast(dict[str, Any], schema)
        if node.get("type") == "object" and "additionalProperties" not in node:
            raise ToolDefinitionError(
                f"tool {tool_name!r}: the object at {at or 'the top'} accepts unknown keys; "
                "give its model ConfigDict(extra='forbid')"
            )
        for key, value in node.items():
            if key not in _DATA_KEYS:
                _require_closed(value, tool_name, at=f"{at}/{key}")


def json_problem(text: str) -> str | None:
    """What is wrong with `text` as one JSON object, or None. Catches what lenient parsers let pass."""
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except RecursionError:
        return "nested too deeply"
    except ValueError as error:
        return str(error)
    return None if isinstance(value, dict) else f"it is a JSON {_json_type(value)}"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {_shown(key)} occurs twice")
        result[key] = value
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _json_type(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "number", float: "number", list: "array"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "null")


def _error_line(detail: ErrorDetails) -> str:
    where = ".".join(str(part) for part in detail["loc"]) or "(arguments)"
    if detail["type"] == "missing":
        return f"{where}: required, but missing"
    if detail["type"] == "extra_forbidden":
        return f"{where}: no such parameter"
    return f"{where}: {detail['msg']}; received {_shown(detail['input'])}"


def _shown(value: Any, limit_chars: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit_chars else f"{text[:limit_chars]}… ({len(text)} characters)"
