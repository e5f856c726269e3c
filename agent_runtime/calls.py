"""Run the calls of one assistant turn, or answer them with the reason why they are not run."""

from __future__ import annotations

from collections.abc import Callable

from agent_runtime.conversation import AssistantTurn, ToolCall
from agent_runtime.events import Emit, ToolStarted
from agent_runtime.repeats import RepeatGuard
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.result import Failure, ToolResult


async def run_calls(
    registry: ToolRegistry,
    turn: AssistantTurn,
    guard: RepeatGuard,
    settle: Callable[[int, ToolResult], None],
    emit: Emit,
) -> None:
    """Run or refuse every call of the turn; `settle` gets each position's result as soon as it is there."""
    if turn.finish_reason not in ("stop", "tool_calls"):
        for position, call in enumerate(turn.tool_calls):
            settle(position, cut_off(call, turn.finish_reason))
        return
    allowed: list[int] = []
    for position, call in enumerate(turn.tool_calls):
        refused = guard.refusal(call)
        if refused is None:
            allowed.append(position)
        else:
            settle(position, refused)

    def finished(index: int, result: ToolResult) -> None:
        call = turn.tool_calls[allowed[index]]
        found = registry.get(call.name)
        changes_state = found is not None and not found.parallel
        settle(allowed[index], guard.observe(call, result, changes_state=changes_state))

    await registry.execute_all(
        [turn.tool_calls[position] for position in allowed],
        on_start=lambda index: emit(ToolStarted(turn.tool_calls[allowed[index]])),
        on_result=finished,
    )


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
