"""Breaks loops of identical calls: first a reminder, then a refusal with the earlier result, then the end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from agent_runtime.conversation import ToolCall
from agent_runtime.tools.result import Failure, ToolResult


@dataclass(frozen=True, slots=True)
class RepeatLimits:
    """At which identical call in a row of equal results something changes."""

    remind_at: int = 3
    refuse_at: int = 4
    stop_at: int = 6

    def __post_init__(self) -> None:
        if not 1 < self.remind_at <= self.refuse_at <= self.stop_at:
            raise ValueError(
                f"remind_at={self.remind_at}, refuse_at={self.refuse_at}, stop_at={self.stop_at}: "
                "they must rise, and remind_at must be above 1"
            )


@dataclass(slots=True)
class _Seen:
    result: str
    count: int


class RepeatGuard:
    """Counts calls with the same name, the same arguments and the same result.

    Other calls in between do not reset a count, or two calls taking turns would never be noticed. What
    resets all counts is progress: a state-changing call that succeeds and was not made before.
    """

    def __init__(self, limits: RepeatLimits | None = None) -> None:
        self._limits = limits or RepeatLimits()
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._changes: set[tuple[str, str]] = set()

    @property
    def exhausted(self) -> bool:
        """Whether some call was repeated so often that the run must end."""
        return any(seen.count >= self._limits.stop_at for seen in self._seen.values())

    def refusal(self, call: ToolCall) -> ToolResult | None:
        """The answer to give in place of running `call` once more, or None when it may run."""
        seen = self._seen.get(_key(call))
        if seen is None or seen.count < self._limits.refuse_at - 1:
            return None
        seen.count += 1
        return ToolResult(
            model=f"Not run: this exact call was made {seen.count} times and the result did not change. "
            f"Use the result below, or do something else.\n\n{seen.result}",
            user=f"{call.name}: same call for the {seen.count}th time, not run",
            failure=Failure.REPEATED,
        )

    def observe(self, call: ToolCall, result: ToolResult, *, changes_state: bool) -> ToolResult:
        """Count a call that was run; its result, with a reminder when it is becoming a habit."""
        key = _key(call)
        if changes_state and result.ok and key not in self._changes:
            self._changes.add(key)
            self._seen.clear()
        seen = self._seen.get(key)
        if seen is None or seen.result != result.model:
            self._seen[key] = _Seen(result.model, 1)
            return result
        seen.count += 1
        if seen.count < self._limits.remind_at:
            return result
        return result.with_note(
            f"[This exact call has now given the same result {seen.count} times. Repeating it will not help.]"
        )


def _key(call: ToolCall) -> tuple[str, str]:
    """Name and canonical arguments; the order of keys and white space make no difference."""
    try:
        value: Any = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.name, call.arguments
    return call.name, json.dumps(value, sort_keys=True)
