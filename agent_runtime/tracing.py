"""OpenTelemetry spans around runs, steps, model calls, tools and compressions; nothing when it is not installed."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

Attribute: TypeAlias = "str | int | float | bool | None"


class Span:
    """A span that may not be there."""

    def __init__(self, inner: Any = None) -> None:
        self._inner = inner

    def set(self, **attributes: Attribute) -> None:
        """Set attributes; those that are None are left out."""
        if self._inner is not None:
            for name, value in attributes.items():
                if value is not None:
                    self._inner.set_attribute(f"k3.{name}", value)


@contextmanager
def span(name: str, **attributes: Attribute) -> Generator[Span]:
    """Run a block in a span of the tracer `agent_runtime`. Exceptions are recorded by the tracer and go on."""
    found = tracer()
    if found is None:
        yield Span()
        return
    with found.start_as_current_span(name) as inner:
        made = Span(inner)
        made.set(**attributes)
        yield made


@cache
def tracer() -> Any:
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace.get_tracer("agent_runtime")
