"""Tool-call arguments: JSON text to typed values and back, as K3's argument elements spell them."""

import json
from typing import Any, Literal, TypeAlias

from k3_sglang.chat.canonical import spaced_json
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.json_types import MAX_NESTING, is_object, nested_beyond

TypeName: TypeAlias = Literal["string", "number", "boolean", "null", "object", "array"]


def type_name(value: Any) -> TypeName:
    """The `type` attribute of a JSON value's argument element."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int | float):
        return "number"
    if value is None:
        return "null"
    return "object" if is_object(value) else "array"


def argument_text(value: Any) -> str:
    """Text between an argument element's tags: strings raw, everything else as JSON."""
    return value if isinstance(value, str) else spaced_json(value)


def load_arguments(arguments: str) -> dict[str, Any] | None:
    """Arguments as an object: {} for blank text, None for text that is not JSON (rendered opaquely).

    Raises ChatRequestError (`tool_arguments_not_object`) for JSON that is not an object; the caller names the
    field. Of duplicate keys the first position and the last value count.
    """
    if not arguments or arguments.isspace():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):  # also numbers too long to convert and nesting too deep
        return None
    if not is_object(value):
        raise ChatRequestError(
            "arguments",
            "tool_arguments_not_object",
            f'arguments are a JSON {type_name(value)}; they must be a JSON object such as {{"key": 1}}',
        )
    return None if nested_beyond(value, MAX_NESTING + 1) else value
