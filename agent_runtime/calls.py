"""Run the calls of one assistant turn, or answer them with the reason why they are not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agent_runtime.conversation import AssistantTurn, ToolCall
from agent_runtime.events import Emit, ToolStarted
from agent_runtime.history import History
from agent_runtime.repeats import RepeatGuard
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.result import Failure, ToolResult


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Calls of a turn that a killed process had begun, by position."""

    results: Mapping[int, ToolResult] = field(default_factory=dict[int, ToolResult])
    """Calls that had ended."""
    started: frozenset[int] = frozenset()
    """Calls whose function had been called; without a result they may have taken effect or not."""


async def run_calls(
    registry: ToolRegistry,
    turn: AssistantTurn,
    guard: RepeatGuard,
    settle: Callable[[int, ToolResult], None],
    emit: Emit,
    *,
    history: History,
    allowance: int | None = None,
    before: Interrupted | None = None,
) -> None:
    """Run or refuse every call of the turn; `settle` gets each position's result as soon as it is there.

    Args:
        history: told when a call starts and how it ended, before anybody else is.
        allowance: how many calls may still be run; None for any number.
        before: what an earlier process did of this turn. Its results are used; a call of a tool that changes things
            and was in the middle is not made again, any other is.
    """
    if turn.finish_reason not in ("stop", "tool_calls"):
        for position, call in enumerate(turn.tool_calls):
            settle(position, cut_off(call, turn.finish_reason))
        return

    def observe(position: int, result: ToolResult) -> None:
        changes = _changes_state(registry, turn.tool_calls[position])
        settle(position, guard.observe(turn.tool_calls[position], result, changes_state=changes))

    allowed: list[int] = []
    for position, call in enumerate(turn.tool_calls):
        if before is not None and position in before.results:
            observe(position, before.results[position])
        elif before is not None and position in before.started and _changes_state(registry, call):
            settle(position, cancelled(call))
        elif (refused := guard.refusal(call)) is not None:
            history.call_refused(call)
            settle(position, refused)
        elif allowance is not None and len(allowed) >= allowance:
            settle(position, over_budget(call))
        else:
            allowed.append(position)

    def started(index: int) -> None:
        call = turn.tool_calls[allowed[index]]
        history.call_started(call)
        emit(ToolStarted(call))

    def finished(index: int, result: ToolResult) -> None:
        call = turn.tool_calls[allowed[index]]
        history.call_ended(call, result, changes_state=_changes_state(registry, call))
        observe(allowed[index], result)

    await registry.execute_all(
        [turn.tool_calls[position] for position in allowed], on_start=started, on_result=finished
    )


def _changes_state(registry: ToolRegistry, call: ToolCall) -> bool:
    found = registry.get(call.name)
    return found is not None and not found.parallel


def cancelled(call: ToolCall) -> ToolResult:
    return ToolResult(
        model="Interrupted before there was a result. The call may have taken effect in part; "
        "check before you repeat it.",
        user=f"{call.name}: interrupted",
        failure=Failure.CANCELLED,
    )


def cut_off(call: ToolCall, finish_reason: str) -> ToolResult:
    return ToolResult(
        model=f"Not run: your message was cut off (finish reason {finish_reason!r}), and a call in it may be "
        "incomplete. Make the call again, with shorter arguments or in several smaller calls.",
        user=f"{call.name}: the answer was cut, not run",
        debug=f"arguments: {call.arguments!r}",
        failure=Failure.CUT_OFF,
    )


def over_budget(call: ToolCall) -> ToolResult:
    return ToolResult(
        model="Not run: the tool calls allowed for this task are used up.",
        user=f"{call.name}: no tool calls left, not run",
        failure=Failure.REFUSED,
    )
