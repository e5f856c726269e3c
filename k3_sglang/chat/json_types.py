"""Type tests for JSON values that keep the type checker informed, and how deep they are."""

from typing import Any, TypeGuard


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a JSON value is an object (whose keys are always strings)."""
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Whether a JSON value is a list."""
    return isinstance(value, list)


MAX_NESTING = 500
"""Deeper values of arguments are text: Python would read them or not by how much of its stack is in use."""


def nested_beyond(value: Any, levels: int) -> bool:
    """Whether lists and objects stand in one another more than `levels` deep."""
    layer: list[Any] = [value]
    for _ in range(levels + 1):
        inner: list[Any] = []
        for item in layer:
            inner += item.values() if is_object(item) else item if is_list(item) else ()
        if not any(is_object(item) or is_list(item) for item in layer):
            return False
        layer = inner
    return True
