"""Tools of a messages request: declarations, the choice among them, and those that are loaded later."""

from dataclasses import dataclass
from typing import Any

from k3_sglang.chat.cache_marks import MARK
from k3_sglang.chat.json_types import is_list, is_object
from k3_sglang.chat.request_fields import refuse, refuse_unknown, required_object, shown, wrong_type

Json = dict[str, Any]

_TOOL_KEYS = frozenset(
    ("type", "name", "description", "input_schema", "strict", "eager_input_streaming", "defer_loading",
     "allowed_callers", "input_examples", MARK)
)  # fmt: skip
_CHOICE_KEYS = frozenset(("type", "name", "disable_parallel_tool_use"))
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools as chat completions declare them: those known from the start, and by name those that are loaded later."""

    declared: list[Json]
    deferred: dict[str, Json]

    def find(self, name: str) -> Json | None:
        """The declaration of a tool that is loaded later; None when it is none of these."""
        return self.deferred.get(name)


def decode_tools(value: Any) -> Tools:
    """``tools``. Raises ChatRequestError, also by name for tools that run on Anthropic's servers."""
    if value is None:
        return Tools([], {})
    if not is_list(value):
        wrong_type("tools", value, "a list of tools")
    declared: list[Json] = []
    deferred: dict[str, Json] = {}
    for position, entry in enumerate(value):
        param = f"tools.{position}"
        tool = required_object(entry, param)
        chat = decode_tool(tool, param)
        if _flag(tool, "defer_loading", param):
            deferred[str(tool.get("name"))] = chat
        else:
            declared.append(chat)
    return Tools(declared, deferred)


def decode_tool(tool: Json, param: str) -> Json:
    """One tool that the client runs."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        refuse(
            f"{param}.type",
            "unsupported_tool_type",
            f"got {shown(kind)}; tools that Anthropic defines or runs do not exist here. Declare a tool of your own, "
            "with name, description and input_schema, and run it yourself",
        )
    refuse_unknown(tool, _TOOL_KEYS, param, "a tool")
    if tool.get("input_examples"):
        refuse(f"{param}.input_examples", "unsupported_field", "K3's declarations have no examples; describe them")
    if tool.get("allowed_callers") not in (None, [], ["direct"]):
        refuse(
            f"{param}.allowed_callers",
            "unsupported_value",
            f'got {shown(tool["allowed_callers"])}; only "direct": no code is run here',
        )
    _flag(tool, "eager_input_streaming", param)  # arguments are always streamed as they are written
    if not is_object(tool.get("input_schema")):
        wrong_type(f"{param}.input_schema", tool.get("input_schema"), "a JSON schema object")
    function: Json = {"name": tool.get("name")}
    for key in ("description", "strict"):
        if tool.get(key) is not None:
            function[key] = tool[key]
    function["parameters"] = tool["input_schema"]
    chat: Json = {"type": "function", "function": function}
    if tool.get(MARK) is not None:
        chat[MARK] = tool[MARK]
    return chat


def decode_choice(value: Any) -> Json:
    """``tool_choice`` as the fields of a chat completion."""
    if value is None:
        return {}
    choice = required_object(value, "tool_choice")
    refuse_unknown(choice, _CHOICE_KEYS, "tool_choice", "tool_choice")
    fields: Json = {}
    kind = choice.get("type")
    if kind == "tool" and isinstance(choice.get("name"), str):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(kind, str) and kind in _CHOICES:
        fields["tool_choice"] = _CHOICES[kind]
    else:
        refuse(
            "tool_choice",
            "invalid_tool_choice",
            f'got {shown(value)}; allowed are the types "auto", "any", "none" and "tool" with a name',
        )
    if _flag(choice, "disable_parallel_tool_use", "tool_choice"):
        fields["parallel_tool_calls"] = False
    return fields


def _flag(owner: Json, key: str, param: str) -> bool:
    value = owner.get(key)
    if value is not None and not isinstance(value, bool):
        wrong_type(f"{param}.{key}", value, "a boolean")
    return bool(value)
