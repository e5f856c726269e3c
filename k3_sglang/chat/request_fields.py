"""Small checks that request parsing is made of; every refusal names the field."""

from collections.abc import Mapping
from typing import Any, NoReturn

from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.json_types import is_object

_SHOWN_CHARS = 80


def refuse(param: str, code: str, message: str) -> NoReturn:
    """Raise the ChatRequestError for one field."""
    raise ChatRequestError(param, code, message)


def shown(value: Any) -> str:
    """A value for an error message, bounded."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"


def wrong_type(param: str, value: Any, allowed: str) -> NoReturn:
    """Refuse a value of the wrong JSON type."""
    refuse(param, "invalid_type", f"got {shown(value)}; expected {allowed}")


def refuse_unknown(value: Mapping[str, Any], known: frozenset[str], param: str, what: str) -> None:
    """Refuse keys that are not `known` and not null; `what` is the thing they stand in."""
    for key, item in value.items():
        if item is not None and key not in known:
            refuse(f"{param}.{key}", "unknown_field", f"{what} has no field {shown(key)}; remove it")


def optional_text(owner: Mapping[str, Any], key: str, param: str) -> str | None:
    """The string under `key`, None when absent or null."""
    value = owner.get(key)
    if value is not None and not isinstance(value, str):
        wrong_type(f"{param}.{key}", value, "a string or null")
    return value


def required_object(value: Any, param: str) -> dict[str, Any]:
    """The value as a JSON object."""
    if not is_object(value):
        wrong_type(param, value, "an object")
    return value
