"""One step: an answer of the model and the results of its calls, each recorded as soon as it is certain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_runtime.calls import Interrupted, cancelled, run_calls
from agent_runtime.conversation import AssistantTurn, Message
from agent_runtime.events import Emit, StepRecord, ToolFinished, ToolRun
from agent_runtime.generation import Generated, generate
from agent_runtime.history import History
from agent_runtime.limits import Retries
from agent_runtime.model import CallOptions, ModelClient
from agent_runtime.repeats import RepeatGuard
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.result import ToolResult
from agent_runtime.tracing import span


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step produced; all of it is in the history already."""

    generated: Generated
    tools: tuple[ToolRun, ...]

    @property
    def turn(self) -> AssistantTurn:
        """The answer."""
        return self.generated.turn


@dataclass(frozen=True, slots=True)
class StepParts:
    """What every step of a run uses."""

    client: ModelClient
    registry: ToolRegistry
    history: History
    tools: Sequence[Mapping[str, Any]]
    """Declarations that every request of the session carries."""
    guard: RepeatGuard
    retries: Retries
    emit: Emit


async def step(
    parts: StepParts,
    options: CallOptions,
    *,
    allowance: int | None,
    on_retry: Callable[[int, str], None],
    on_answer: Callable[[Generated], None],
) -> StepOutcome:
    """One answer and the results of its calls.

    The whole assistant message is recorded before any tool starts, the results when all are there. When the step is
    cancelled while tools run, every call still gets a result, so that the history never holds a call without one.

    Raises:
        ChatError: the model call failed.
        asyncio.CancelledError: the caller was cancelled.
    """
    generated = await generate(
        parts.client,
        parts.history,
        parts.registry,
        parts.tools,
        options=options,
        retries=parts.retries,
        on_delta=parts.emit,
        on_retry=on_retry,
    )
    if not generated.turn.empty:
        parts.history.append(generated.turn.message(), generated.turn)
    on_answer(generated)
    return StepOutcome(generated, await answer_calls(parts, generated.turn, allowance=allowance))


async def answer_calls(
    parts: StepParts, turn: AssistantTurn, *, allowance: int | None = None, before: Interrupted | None = None
) -> tuple[ToolRun, ...]:
    """Give every call of a recorded turn its result, also when cancelled in the middle."""
    results: dict[int, ToolResult] = {}
    waiting = {call.id for call in parts.history.conversation.open_calls}

    def settle(position: int, result: ToolResult) -> None:
        results[position] = _with_pointer(turn, position, result, parts.registry)
        parts.emit(ToolFinished(turn.tool_calls[position], results[position]))

    try:
        with span("tools", calls=len(turn.tool_calls)):
            await run_calls(
                parts.registry,
                turn,
                parts.guard,
                settle,
                parts.emit,
                history=parts.history,
                allowance=allowance,
                before=before,
            )
    finally:
        for position, call in enumerate(turn.tool_calls):
            if position not in results:
                settle(position, cancelled(call))
            if call.id in waiting:
                parts.history.append(Message(role="tool", content=results[position].model, tool_call_id=call.id))
    return tuple(ToolRun(call, results[position]) for position, call in enumerate(turn.tool_calls))


def _with_pointer(turn: AssistantTurn, position: int, result: ToolResult, registry: ToolRegistry) -> ToolResult:
    """Says how a result that was cut can be read in full, if the model has the tool for it."""
    if result.full is None or registry.get(RECOVERY_TOOL) is None:
        return result
    call_id = turn.tool_calls[position].id
    return result.with_note(f"[The whole result was kept: read it in parts with {RECOVERY_TOOL}(call_id={call_id!r}).]")


RECOVERY_TOOL = "read_history"


def record(number: int, outcome: StepOutcome) -> StepRecord:
    """What is reported about a step."""
    turn, usage, generated = outcome.turn, outcome.turn.usage, outcome.generated
    return StepRecord(
        step=number,
        prompt_tokens=usage.prompt_tokens if usage else None,
        cached_tokens=usage.cached_tokens if usage else None,
        extend_tokens=usage.extend_tokens if usage else None,
        completion_tokens=usage.completion_tokens if usage else None,
        ttft_s=turn.ttft_s,
        duration_s=turn.duration_s,
        finish_reason=turn.finish_reason,
        tools=outcome.tools,
        attempts=generated.attempts,
        wasted_tokens=generated.wasted_tokens,
        faults=tuple(generated.faults),
    )
