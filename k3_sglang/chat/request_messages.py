"""Messages of a request: roles, contents, reasoning, calls and results."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from k3_sglang.chat.arguments import load_arguments
from k3_sglang.chat.cache_marks import MARK, cache_ttl_s, longest_ttl_s, unmarked_tools
from k3_sglang.chat.canonical import spaced_json
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.json_types import is_list, is_object
from k3_sglang.chat.request_fields import (
    optional_text,
    refuse,
    refuse_unknown,
    required_object,
    shown,
    wrong_type,
)
from k3_sglang.chat.request_tools import parse_tools
from k3_sglang.chat.types import (
    Content,
    ContentPart,
    ImagePart,
    ImageResolver,
    JSONObject,
    Message,
    Role,
    TextPart,
    ToolCall,
)

SIGNATURE = "k3_signature"
"""Key of an assistant message that names the recorded turn it is; other protocols have fields for it."""

_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# A hint; it changes nothing about the prompt.
_HINT_KEYS = frozenset((MARK,))
_COMMON_KEYS = _HINT_KEYS | {"role", "content", "name"}
# `tools` is let through for its own refusal, which says where it belongs.
_ROLE_KEYS: dict[Role, frozenset[str]] = {
    "system": _COMMON_KEYS | {"tools"},
    "user": _COMMON_KEYS | {"tools"},
    "tool": _COMMON_KEYS | {"tools", "tool_call_id", "tool"},
}
# What other roles have: a client that writes every message with the same fields leaves these empty.
_OTHER_ROLES_KEYS = frozenset(("reasoning_content", "reasoning", "tool_calls", "tool_call_id", "tool"))
_TEXT_PART_KEYS = _HINT_KEYS | {"type", "text"}
_IMAGE_KINDS = ("image", "image_url")
_IMAGE_KEYS = frozenset(("url", "detail"))
_UNSUPPORTED_ASSISTANT_KEYS = ("function_call", "prefix", "partial")


class MessageParser:
    """Parses messages in order; holds what runs across them (image sizes, given or found by `images`)."""

    def __init__(self, image_sizes: Any, images: ImageResolver | None = None, *, strict: bool) -> None:
        self._strict = strict
        self._images = images
        if image_sizes is not None and not is_list(image_sizes):
            wrong_type("image_sizes", image_sizes, "a list of [width, height], one for each image part")
        self._sizes: Iterator[Any] = iter(image_sizes or ())

    def parse(self, value: Any, index: int) -> Message | None:
        """One message; None for an entry the reference skips (never when strict)."""
        param = f"messages[{index}]"
        if not is_object(value):
            return wrong_type(param, value, "a message object") if self._strict else None
        role = self._role(value, param)
        if role is None:
            return None
        if self._strict:
            _check_keys(value, role, param)
        tools, tools_ttl_s = self._tools(value, role, param)
        content = self._content(value.get("content"), role, f"{param}.content")
        if tools and self._strict and content:
            refuse(
                f"{param}.content",
                "content_beside_tools",
                f"got {shown(value['content'])}; a system message that declares tools has no content, "
                "send the text in a message of its own",
            )
        if tools and self._strict and value.get("name"):
            refuse(f"{param}.name", "name_beside_tools", "a system message that declares tools has no name; remove it")
        assistant = role == "assistant"
        return Message(
            role=role,
            content=content,
            reasoning=_reasoning(value, param) if assistant else None,
            tool_calls=self._tool_calls(value.get("tool_calls"), f"{param}.tool_calls") if assistant else (),
            tool_call_id=optional_text(value, "tool_call_id", param) if role == "tool" else None,
            name=_name(value, role, param),
            tools=tools or None,
            cache_ttl_s=longest_ttl_s((tools_ttl_s, self._ttl_s(value, param))),
            signature=optional_text(value, SIGNATURE, param) if assistant and self._strict else None,
        )

    def finish(self) -> None:
        """Refuse image sizes that no image used."""
        left = sum(1 for _ in self._sizes)
        if left:
            refuse("image_sizes", "image_count_mismatch", f"{left} image sizes are left over; give one per image part")

    def _role(self, value: Mapping[str, Any], param: str) -> Role | None:
        name = value.get("role")
        if isinstance(name, str):
            if name in _ROLES:
                return _ROLES[name]
            if name == "developer" and self._strict:
                return "system"
        if self._strict:
            refuse(
                f"{param}.role",
                "unknown_role",
                f"got {shown(name)}; allowed are system, developer, user, assistant and tool",
            )
        return None

    def _ttl_s(self, owner: Mapping[str, Any], param: str) -> int | None:
        """The mark of a message or part; the reference knows none."""
        return cache_ttl_s(owner, param) if self._strict else None

    def _tools(self, value: Mapping[str, Any], role: Role, param: str) -> tuple[tuple[JSONObject, ...], int | None]:
        declared, ttl_s = value.get("tools"), None
        if declared is not None and role != "system":
            if self._strict:
                refuse(f"{param}.tools", "tools_on_wrong_role", f"a {role} message cannot declare tools; system can")
            return (), None
        if self._strict:
            declared, ttl_s = unmarked_tools(declared, f"{param}.tools")
        return parse_tools(declared, f"{param}.tools", strict=self._strict), ttl_s

    def _content(self, value: Any, role: Role, param: str) -> Content:
        if value is None or isinstance(value, str):
            return value
        if not is_list(value):
            wrong_type(param, value, "a string, a list of parts or null")
        return tuple(self._part(part, role, f"{param}[{position}]") for position, part in enumerate(value))

    def _part(self, part: Any, role: Role, param: str) -> ContentPart:
        if isinstance(part, str) and not self._strict:
            return TextPart(part)
        part = required_object(part, param)
        kind = part.get("type")
        if kind in _IMAGE_KINDS:
            return self._image(part, role, param)
        text = part.get("text")
        if not isinstance(text, str) or (self._strict and kind != "text"):
            refuse(
                param,
                "content_part_without_text",
                f'got a part of type {shown(kind)}; allowed are {{"type": "text", "text": "..."}} and images',
            )
        if self._strict and role != "assistant":
            refuse_unknown(part, _TEXT_PART_KEYS, param, "a text part")
        return TextPart(text, self._ttl_s(part, param))

    def _tool_calls(self, value: Any, param: str) -> tuple[ToolCall, ...]:
        if value is None:
            return ()
        if not is_list(value):
            wrong_type(param, value, "a list of tool calls or null")
        return tuple(
            _tool_call(call, f"{param}[{position}]", strict=self._strict) for position, call in enumerate(value)
        )

    def _image(self, part: Mapping[str, Any], role: Role, param: str) -> ImagePart:
        if self._strict:
            _check_image_keys(part, role, param)
        source = image_source(part)
        if source is None:
            wrong_type(param, part.get(str(part["type"])), "an image given as a string or an object with `url`")
        ttl_s = self._ttl_s(part, param)
        size = next(self._sizes, None)
        if size is None and self._images is not None:
            image = self._images(source, param)
            return image if ttl_s is None else replace(image, cache_ttl_s=ttl_s)
        if size is None:
            refuse(
                param,
                "image_count_mismatch",
                "images cannot be used here: their sizes, which the prompt must state, are unknown; send text only",
            )
        if not is_list(size) or len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
            wrong_type("image_sizes", size, "[width, height] in pixels")
        return ImagePart(source, (size[0], size[1]), cache_ttl_s=ttl_s)


def image_source(part: Mapping[str, Any]) -> str | None:
    """The source of an image part: `image_url` or `image` holds it as a string or an object with `url`."""
    source = part.get(str(part["type"]))
    if is_object(source):
        source = source.get("url")
    return source if isinstance(source, str) else None


def image_sources(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Path and source of every image part of a request body, in order, before it is parsed.

    For whoever has to fetch sources first; entries that are not what they should be are left to `parse_request`.
    """
    for index, message in enumerate(_entries(body.get("messages"))):
        for position, part in enumerate(_entries(message.get("content")) if is_object(message) else ()):
            if is_object(part) and part.get("type") in _IMAGE_KINDS and (source := image_source(part)) is not None:
                yield f"messages[{index}].content[{position}]", source


def _entries(value: Any) -> list[Any]:
    return value if is_list(value) else []


def _check_image_keys(part: Mapping[str, Any], role: Role, param: str) -> None:
    """No key is ignored: `detail` is accepted where it says what happens anyway."""
    kind = str(part["type"])
    if role != "assistant":
        refuse_unknown(part, _HINT_KEYS | {"type", kind}, param, "an image part")
    image = part.get(kind)
    if not is_object(image):
        return
    refuse_unknown(image, _IMAGE_KEYS, f"{param}.{kind}", "an image")
    if image.get("detail") not in (None, "auto", "high"):
        refuse(
            f"{param}.{kind}.detail",
            "unsupported_value",
            f'got {shown(image["detail"])}; allowed are "auto" and "high", which mean the same: K3 sees every image '
            "in its own resolution. For fewer tokens send a smaller image",
        )


def _check_keys(value: Mapping[str, Any], role: Role, param: str) -> None:
    """Assistant messages echo server output and may carry anything beside what would change the turn."""
    if role == "assistant":
        for key in _UNSUPPORTED_ASSISTANT_KEYS:
            if value.get(key):
                refuse(f"{param}.{key}", "unsupported_field", f"got {shown(value[key])}; remove this field")
        return
    empty = {key for key in _OTHER_ROLES_KEYS if not value.get(key)}
    refuse_unknown(value, _ROLE_KEYS[role] | empty, param, f"a {role} message")


def _name(value: Mapping[str, Any], role: Role, param: str) -> str | None:
    """The participant's name; on a tool message the tool's, which may also stand under `tool`."""
    name = optional_text(value, "name", param)
    if not name and role == "tool":
        name = optional_text(value, "tool", param)
    return name or None


def _reasoning(value: Mapping[str, Any], param: str) -> str | None:
    """`reasoning_content`, or `reasoning` (the other dialect) when that is empty."""
    first = optional_text(value, "reasoning_content", param)
    second = optional_text(value, "reasoning", param)
    return first or second


def _tool_call(call: Any, param: str, *, strict: bool) -> ToolCall:
    call = required_object(call, param)
    kind = call.get("type", "function")
    if kind not in ("function", None):
        refuse(f"{param}.type", "unsupported_tool_type", f'got {shown(kind)}; only "function" calls exist')
    nested = call.get("function")
    function = call if nested is None else required_object(nested, f"{param}.function")
    field = param if nested is None else f"{param}.function"
    name = function.get("name")
    if not isinstance(name, str) or not name:
        wrong_type(f"{field}.name", name, "the tool's name")
    return ToolCall(
        id=optional_text(call, "id", param) or "",
        name=name,
        arguments=_arguments_text(function.get("arguments"), f"{field}.arguments", strict=strict),
    )


def _arguments_text(value: Any, param: str, *, strict: bool) -> str:
    """Arguments as JSON text; an object is written out, null is empty.

    Strict takes the text "null" alike: several servers write it for a call without arguments, and clients send it
    back as it came. The reference has it among what is no object.
    """
    if value is None or (strict and isinstance(value, str) and value.strip() == "null"):
        return ""
    if is_object(value):
        try:
            return spaced_json(value)
        except (ValueError, RecursionError):
            refuse(param, "invalid_json", "arguments are nested too deeply; flatten them")
    if not isinstance(value, str):
        refuse(
            param,
            "tool_arguments_wrong_type",
            f"got {shown(value)}; arguments are a JSON object as text, or the object itself",
        )
    try:
        load_arguments(value)
    except ChatRequestError as error:
        raise ChatRequestError(param, error.code, error.message) from None
    return value
