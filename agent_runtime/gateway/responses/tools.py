"""Tools, tool_choice, text and reasoning of a Responses request to the fields of a chat completion."""

from collections.abc import Mapping, Sequence
from typing import Any

from k3_sglang.chat.json_types import is_list, is_object
from k3_sglang.chat.request_fields import refuse, refuse_unknown, required_object, shown, wrong_type

REFUSED_TOOLS: Mapping[str, str] = {
    "custom": "K3 writes a call as named arguments, free text and grammars have no form there; declare a function "
    "with one string",
    "mcp": "the gateway connects to no MCP server; run MCP in the client and send its tools as functions",
    "local_shell": "declare the shell as a function and run it in the client",
    "shell": "declare the shell as a function and run it in the client",
    "apply_patch": "declare it as a function and apply the patch in the client",
}
_HOSTED_TOOL = "a tool that the provider runs does not exist here; declare a function and run it in the client"
_TOOL_KEYS = frozenset(("type", "name", "description", "parameters", "strict", "cache_control"))
_FUNCTION_KEYS = ("name", "description", "parameters", "strict", "cache_control")
_CHOICE_KEYS = frozenset(("type", "name"))
_ALLOWED_KEYS = frozenset(("type", "mode", "tools"))
_WORDS = ("auto", "none", "required")
_TEXT_KEYS = frozenset(("format", "verbosity"))
_REASONING_KEYS = frozenset(("effort", "summary", "generate_summary"))
_SCHEMA_KEYS = ("name", "description", "schema", "strict")


def chat_tools(value: Any) -> list[dict[str, Any]]:
    """``tools`` in their flat form, nested as chat has them; null keys are left out, as what is not said.

    Raises ChatRequestError that names a tool of another type, and why it is refused.
    """
    if not is_list(value):
        wrong_type("tools", value, "a list of tools")
    return [_tool(required_object(tool, f"tools[{at}]"), f"tools[{at}]") for at, tool in enumerate(value)]


def _tool(tool: dict[str, Any], param: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        reason = REFUSED_TOOLS.get(kind, _HOSTED_TOOL) if isinstance(kind, str) else 'only "function" tools are served'
        refuse(f"{param}.type", "unsupported_tool_type", f"got {shown(kind)}; {reason}")
    if "function" in tool:
        refuse(f"{param}.function", "unknown_field", "in this API name, parameters and strict stand in the tool itself")
    refuse_unknown(tool, _TOOL_KEYS, param, "a function tool")
    return {"type": "function", "function": {key: tool[key] for key in _FUNCTION_KEYS if tool.get(key) is not None}}


def chat_tool_choice(value: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    """``tool_choice`` as chat has it. ``tools`` are those of the request, as `chat_tools` returns them."""
    if isinstance(value, str):
        if value not in _WORDS:
            refuse("tool_choice", "invalid_tool_choice", f"got {shown(value)}; allowed are {', '.join(_WORDS)}")
        return value
    value = required_object(value, "tool_choice")
    kind = value.get("type")
    if kind == "function":
        refuse_unknown(value, _CHOICE_KEYS, "tool_choice", "a named tool_choice")
        return {"type": "function", "function": {"name": value.get("name")}}
    if kind == "allowed_tools":
        names = [tool["function"].get("name") for tool in tools]
        # A name that is no text is refused where the tools are read.
        return _allowed(value, [name for name in names if isinstance(name, str)])
    refuse(
        "tool_choice.type",
        "invalid_tool_choice",
        f'got {shown(kind)}; allowed are {", ".join(_WORDS)}, {{"type": "function", "name": "..."}} and allowed_tools: '
        "other tools do not exist here",
    )


def _allowed(value: dict[str, Any], declared: Sequence[str]) -> Any:
    """A choice among some tools: none, all or one of them can be said to K3; a part of them cannot."""
    refuse_unknown(value, _ALLOWED_KEYS, "tool_choice", "allowed_tools")
    mode = value.get("mode")
    if mode not in ("auto", "required"):
        refuse("tool_choice.mode", "invalid_tool_choice", f'got {shown(mode)}; allowed are "auto" and "required"')
    entries = value.get("tools")
    if not is_list(entries):
        wrong_type("tool_choice.tools", entries, 'a list of {"type": "function", "name": "..."}')
    names: list[str] = []
    for at, entry in enumerate(entries):
        name = entry.get("name") if is_object(entry) and entry.get("type") == "function" else None
        if not isinstance(name, str) or name not in declared:
            refuse(
                f"tool_choice.tools[{at}]",
                "unknown_tool",
                f'got {shown(entry)}; name declared tools as {{"type": "function", "name": "..."}}: {shown(declared)}',
            )
        names.append(name)
    if set(names) == set(declared):
        return mode
    if not names and mode == "auto":
        return "none"
    if len(set(names)) == 1 and mode == "required":
        return {"type": "function", "function": {"name": names[0]}}
    refuse(
        "tool_choice.tools",
        "unsupported_value",
        f"{len(set(names))} of {len(declared)} tools; K3 can be told all, none (mode auto), or one (mode required). "
        "Send only the tools that may be called",
    )


def chat_response_format(value: Any) -> Any:
    """``text`` to ``response_format``; None for plain text."""
    value = required_object(value, "text")
    refuse_unknown(value, _TEXT_KEYS, "text", "text")
    if value.get("verbosity") not in (None, "medium"):
        refuse(
            "text.verbosity",
            "unsupported_value",
            f'got {shown(value["verbosity"])}; K3 has no such setting: "medium" only',
        )
    form = value.get("format")
    if form is None:
        return None
    form = required_object(form, "text.format")
    if form.get("type") != "json_schema":
        return form
    refuse_unknown(form, frozenset(("type", *_SCHEMA_KEYS)), "text.format", "a json_schema format")
    return {"type": "json_schema", "json_schema": {key: form[key] for key in _SCHEMA_KEYS if form.get(key) is not None}}


def chat_effort(value: Any) -> Any:
    """``reasoning`` to ``reasoning_effort``; None for the default."""
    value = required_object(value, "reasoning")
    refuse_unknown(value, _REASONING_KEYS, "reasoning", "reasoning")
    for key in ("summary", "generate_summary"):
        if value.get(key) not in (None, "auto"):
            refuse(
                f"reasoning.{key}",
                "unsupported_value",
                f'got {shown(value[key])}; allowed is "auto": nothing is summarised, thinking is delivered whole',
            )
    return value.get("effort")
