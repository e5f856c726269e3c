"""Tool declarations, tool_choice and response_format of a request."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from k3_sglang.chat.canonical import canonical_json
from k3_sglang.chat.json_types import is_list, is_object
from k3_sglang.chat.request_fields import optional_text, refuse, refuse_unknown, required_object, shown, wrong_type
from k3_sglang.chat.tags import MAX_KEY_CHARS
from k3_sglang.chat.types import JSONObject, NamedTool, ResponseFormat, ToolChoice

TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,127}")
_CHOICES: dict[str, Literal["auto", "none", "required"]] = {"auto": "auto", "none": "none", "required": "required"}
_CHOICE_KEYS = frozenset(("type", "function"))
_CHOICE_FUNCTION_KEYS = frozenset(("name",))
_FORMAT_KEYS = frozenset(("type",))
_SCHEMA_FORMAT_KEYS = frozenset(("type", "json_schema"))
_SCHEMA_HOLDER_KEYS = frozenset(("name", "description", "schema", "strict"))
_TOOL_NAME_RULE = "1 to 128 of A-Z a-z 0-9 _ . - with a letter or _ first"


def parse_tools(value: Any, param: str, *, strict: bool) -> tuple[JSONObject, ...]:
    """Tool declarations, kept exactly as sent; null and [] mean none.

    Strict refuses what is not a function tool with a usable name and an object schema; the reference
    (not strict) renders any list.
    """
    if value is None:
        return ()
    if not is_list(value):
        wrong_type(param, value, "a list of tools")
    if strict:
        for position, tool in enumerate(value):
            _check_tool(tool, f"{param}[{position}]")
    _check_renderable(value, param)
    return tuple(value)


def check_unique(tools: Sequence[JSONObject], params: Sequence[str]) -> None:
    """Refuse two declarations of one name, wherever they stand."""
    seen: dict[str, str] = {}
    for tool, param in zip(tools, params, strict=True):
        name = tool["function"]["name"]
        if name in seen:
            refuse(
                f"{param}.function.name",
                "duplicate_tool",
                f"tool {name!r} is already declared at {seen[name]}; declare every tool once",
            )
        seen[name] = param


def _check_tool(tool: Any, param: str) -> None:
    tool = required_object(tool, param)
    if tool.get("type") != "function":
        refuse(
            f"{param}.type",
            "unsupported_tool_type",
            f'got {shown(tool.get("type"))}; only "function" tools are served',
        )
    function = required_object(tool.get("function"), f"{param}.function")
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        refuse(f"{param}.function.name", "invalid_tool_name", f"got {shown(name)}; a name is {_TOOL_NAME_RULE}")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        wrong_type(f"{param}.function.description", description, "a string")
    flag = function.get("strict")
    if flag is not None and not isinstance(flag, bool):
        wrong_type(f"{param}.function.strict", flag, "a boolean")
    _check_parameters(function.get("parameters"), f"{param}.function.parameters")


def _check_parameters(schema: Any, param: str) -> None:
    """Arguments are an object, so its schema is one and, if it names a type, allows objects."""
    if schema is None:
        return
    schema = required_object(schema, param)
    kind = schema.get("type", "object")
    if kind != "object" and not (is_list(kind) and "object" in kind):
        refuse(f"{param}.type", "invalid_schema", f'got {shown(kind)}; tool arguments are always an "object"')
    properties = schema.get("properties", {})
    if not is_object(properties):
        wrong_type(f"{param}.properties", properties, "an object of schemas by property name")
    required = schema.get("required", [])
    if not is_list(required) or not all(isinstance(name, str) for name in required):
        wrong_type(f"{param}.required", required, "a list of property names")
    for key, names in (("properties", properties), ("required", required)):
        long = next((name for name in names if len(name) > MAX_KEY_CHARS), None)
        if long is not None:
            refuse(
                f"{param}.{key}",
                "invalid_schema",
                f"{shown(long)} is longer than the {MAX_KEY_CHARS} characters that an argument's name may have",
            )


def _check_renderable(value: Any, param: str) -> None:
    try:
        canonical_json(value)
    except (TypeError, ValueError, RecursionError):
        refuse(param, "invalid_json", "the value is nested too deeply or is not plain JSON; flatten it")


def parse_tool_choice(value: Any, tools: Sequence[JSONObject], *, strict: bool) -> ToolChoice | None:
    """tool_choice as a word or a named tool; "required" and names need a declared tool."""
    if value is None:
        return None
    word = _CHOICES.get(value) if isinstance(value, str) else None
    if word is not None:
        if word == "required" and strict and not tools:
            refuse("tool_choice", "no_tools", 'tool_choice "required" needs at least one declared tool')
        return word
    name = _named_tool(value, strict=strict)
    if name is None:
        refuse(
            "tool_choice",
            "invalid_tool_choice",
            f'got {shown(value)}; allowed are "auto", "none", "required" and '
            '{"type": "function", "function": {"name": "..."}}',
        )
    names = [tool["function"]["name"] for tool in tools] if strict else [name]
    if name not in names:
        refuse(
            "tool_choice.function.name",
            "unknown_tool",
            f"no declared tool is called {shown(name)}; declared: {shown(names)}",
        )
    return NamedTool(name)


def _named_tool(value: Any, *, strict: bool) -> str | None:
    if not is_object(value) or value.get("type") != "function":
        return None
    function = value.get("function")
    if not is_object(function) or not isinstance(function.get("name"), str):
        return None
    if strict:
        refuse_unknown(value, _CHOICE_KEYS, "tool_choice", "a named tool_choice")
        refuse_unknown(function, _CHOICE_FUNCTION_KEYS, "tool_choice.function", "a named tool_choice")
    return function["name"]


def parse_response_format(value: Any, *, strict: bool) -> ResponseFormat | None:
    """response_format; None for absent, null and {"type": "text"}."""
    if value is None:
        return None
    value = required_object(value, "response_format")
    kind = value.get("type")
    if strict:
        keys = _SCHEMA_FORMAT_KEYS if kind == "json_schema" else _FORMAT_KEYS
        refuse_unknown(value, keys, "response_format", f"a response_format of type {shown(kind)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat("json_object")
    if kind != "json_schema":
        refuse(
            "response_format.type",
            "unsupported_response_format",
            f'got {shown(kind)}; allowed are "text", "json_object" and "json_schema"',
        )
    holder = required_object(value.get("json_schema"), "response_format.json_schema")
    if strict:
        _check_schema_holder(holder, "response_format.json_schema")
    schema: Any = holder.get("schema")
    param = "response_format.json_schema.schema"
    if schema is None and not strict:
        schema = holder
    if not is_object(schema) and not isinstance(schema, bool):
        wrong_type(param, schema, "a JSON schema object")
    _check_renderable(schema, param)
    return ResponseFormat("json_schema", schema)


def _check_schema_holder(holder: Mapping[str, Any], param: str) -> None:
    """The schema's name and description never reach K3's prompt, and its answer is held to it, `strict` or not."""
    refuse_unknown(holder, _SCHEMA_HOLDER_KEYS, param, "a json_schema")
    optional_text(holder, "name", param)
    optional_text(holder, "description", param)
    flag = holder.get("strict")
    if flag is not None and not isinstance(flag, bool):
        wrong_type(f"{param}.strict", flag, "a boolean")
