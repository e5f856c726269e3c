"""Keywords of JSON schemas: which say what values are allowed, which values of theirs can be used, where $ref leads."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from k3_sglang.chat.json_types import is_list, is_object

# Keywords that say nothing about which values are allowed.
_ANNOTATIONS = frozenset(
    ("$schema", "$id", "$defs", "definitions", "$comment", "$anchor", "title", "description", "default", "examples")
    + ("deprecated", "readOnly", "writeOnly", "format", "nullable", "strict")
)

# The grammar engine counts in 32 bits, and a number in a rule is written out digit by digit.
_MAX_COUNT = 10**9
_MAX_NUMBER = 10**18

# A reference into a list counts its items; no schema has more than this many digits of them.
_INDEX_DIGITS = 9


class StepBudget:
    """Steps that the schemas of one request may take together.

    References and unions can double at every level, so that a schema of a kilobyte has more alternatives than
    anybody can write down.
    """

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int = 1) -> bool:
        """Whether `steps` more were left; they are taken. Once refused, nothing is left."""
        self._left = max(self._left - steps, -1)
        return self._left >= 0


def usable(schema: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
    """The schema without annotations and without keywords whose value no rule can be made of.

    `note` hears of the latter, and of keywords that stay but that rules cannot express.
    """
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        check = _EXPRESSED.get(key)
        if check is None:
            note(key)
        elif not check(value):
            note(f"unusable {key}")
            continue
        kept[key] = value
    return kept


def _is_types(value: Any) -> bool:
    return isinstance(value, str) or (is_list(value) and all(isinstance(item, str) for item in value))


def _is_names(value: Any) -> bool:
    return is_list(value) and all(isinstance(item, str) for item in value)


def _is_schema(value: Any) -> bool:
    return is_object(value) or isinstance(value, bool)


def _is_union(value: Any) -> bool:
    return is_list(value) and len(value) > 0


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a keyword that counts has a usable value."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a keyword that bounds numbers has a usable value."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    # Compared before it is converted: an integer may be too large for a float.
    return -_MAX_NUMBER <= value <= _MAX_NUMBER and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_any(value: Any) -> bool:
    return True


_EXPRESSED: dict[str, Callable[[Any], bool]] = {
    "type": _is_types,
    "enum": is_list,
    "const": _is_any,
    "anyOf": _is_union,
    "oneOf": _is_union,
    "allOf": is_list,
    "$ref": _is_text,
    "properties": is_object,
    "required": _is_names,
    "additionalProperties": _is_schema,
    "items": _is_schema,
    "prefixItems": is_list,
    "minItems": is_count,
    "maxItems": is_count,
    "minLength": is_count,
    "maxLength": is_count,
    "minimum": is_number,
    "maximum": is_number,
    "exclusiveMinimum": is_number,
    "exclusiveMaximum": is_number,
    "multipleOf": is_number,
}
"""Keywords that rules express, with the test that their value must pass."""


def resolve(document: Any, reference: str) -> Any:
    """The schema a local reference points at; None if there is none."""
    if not reference.startswith("#"):
        return None
    node = document
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if is_object(node) and key in node:
            node = node[key]
        elif is_list(node) and key.isdecimal() and len(key) <= _INDEX_DIGITS and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node
