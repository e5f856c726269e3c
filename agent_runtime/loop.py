"""The agent loop: `generate` makes a turn, `step` adds tool results, `Agent.run` repeats until an answer."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agent_runtime.calls import cancelled, run_calls
from agent_runtime.conversation import AssistantTurn, Conversation, Delta, Message, ToolCall
from agent_runtime.engine.chat_errors import ContextOverflow
from agent_runtime.events import (
    Emit,
    Event,
    RunFinished,
    RunResult,
    RunStatus,
    StepFinished,
    StepRecord,
    StepStarted,
    ToolFinished,
    ToolRun,
)
from agent_runtime.repeats import RepeatGuard, RepeatLimits
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.result import ToolResult

Record = Callable[[Message], None]


class ModelClient(Protocol):
    """What the loop needs of a model; `ChatClient` is one."""

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = ...,
        *,
        on_delta: Callable[[Delta], None] = ...,
    ) -> AssistantTurn:
        """One complete answer to `messages`; must not modify its arguments."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one run. None means no bound."""

    max_steps: int = 50
    token_budget: int | None = None
    """Tokens that had to be computed (uncached prompt plus answer), summed up and checked after each step."""
    time_budget_s: float | None = None
    """Seconds for the whole run; whatever is going on then is cancelled."""
    repeats: RepeatLimits = RepeatLimits()

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ValueError(f"max_steps={self.max_steps}, must be at least 1")


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step produced; all of it has been handed to `record` already."""

    turn: AssistantTurn
    tools: tuple[ToolRun, ...]


async def generate(
    client: ModelClient,
    conversation: Conversation,
    tools: Sequence[Mapping[str, Any]],
    *,
    on_delta: Callable[[Delta], None],
) -> AssistantTurn:
    """One answer of the model, with call ids that are unique in the conversation. Nothing is modified.

    Raises:
        ChatError: the model call failed.
    """
    turn = await client.complete(conversation.messages, tools, on_delta=on_delta)
    return replace(turn, tool_calls=_with_unique_ids(turn.tool_calls, conversation.call_ids))


async def step(
    client: ModelClient,
    registry: ToolRegistry,
    conversation: Conversation,
    tools: Sequence[Mapping[str, Any]],
    *,
    guard: RepeatGuard,
    record: Record,
    emit: Emit,
) -> StepOutcome:
    """One answer and the results of its calls.

    Messages go to `record` as soon as they are certain: the whole assistant message before any tool starts,
    the results when all are there. When the step is cancelled while tools run, every call still gets a
    result, so that the history never holds a call without one.

    Raises:
        ChatError: the model call failed; nothing was recorded.
        asyncio.CancelledError: the caller was cancelled.
    """
    turn = await generate(client, conversation, tools, on_delta=emit)
    if not turn.empty:
        record(turn.message())
    results: dict[int, ToolResult] = {}

    def settle(position: int, result: ToolResult) -> None:
        results[position] = result
        emit(ToolFinished(turn.tool_calls[position], result))

    try:
        await run_calls(registry, turn, guard, settle, emit)
    finally:
        for position, call in enumerate(turn.tool_calls):
            if position not in results:
                settle(position, cancelled(call))
            record(Message(role="tool", content=results[position].model, tool_call_id=call.id))
    runs = tuple(ToolRun(call, results[position]) for position, call in enumerate(turn.tool_calls))
    return StepOutcome(turn, runs)


class Agent:
    """A conversation with a model that has tools.

    The system text and the tool declarations are fixed when the agent is made: they open every prompt, and a
    prompt that changes at its start loses all of its cached prefix.
    """

    def __init__(
        self,
        client: ModelClient,
        registry: ToolRegistry,
        system: str | None = None,
        *,
        limits: Limits | None = None,
        conversation: Conversation | None = None,
    ) -> None:
        """
        Args:
            system: the first message; None for none.
            conversation: a history to carry on with instead, for example one that was saved; excludes
                `system`.
        """
        if conversation is not None and system is not None:
            raise ValueError("give either a system text for a new conversation or a conversation to carry on with")
        self._client = client
        self._registry = registry
        self._tools = registry.schemas()
        self._limits = limits or Limits()
        self._running = False
        self.conversation = conversation or Conversation()
        if system is not None:
            self.conversation.append(Message(role="system", content=system))

    async def run(self, task: str, *, on_event: Emit = lambda _: None) -> RunResult:
        """Give the model a task and go on until it answers without calling a tool, or a limit is reached.

        Raises:
            ConversationError: `task` is blank.
            ChatError: a model call failed. The history stays valid, and `run` may be called again.
            asyncio.CancelledError: the caller was cancelled; calls that were running have a result that says
            so.
            RuntimeError: the agent is already running.
        """
        if self._running:
            raise RuntimeError("this agent is already running; a conversation has one turn at a time")
        self._running = True
        try:
            self._close_open_calls()
            self.conversation.append(Message(role="user", content=task))
            return await self._run(on_event)
        finally:
            self._running = False

    async def run_stream(self, task: str) -> AsyncGenerator[Event, None]:
        """`run` as a stream of events; `RunFinished` is the last. Leaving the loop early cancels the run."""
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        worker = asyncio.create_task(self.run(task, on_event=events.put_nowait))
        worker.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            await worker
        finally:
            worker.cancel()
            with suppress(asyncio.CancelledError):
                await worker

    async def _run(self, emit: Emit) -> RunResult:
        outcomes: list[StepOutcome] = []
        records: list[StepRecord] = []
        timer = asyncio.timeout(self._limits.time_budget_s)
        try:
            async with timer:
                status = await self._steps(outcomes, records, emit)
        except TimeoutError:
            if not timer.expired():
                raise
            status = RunStatus.TIME_BUDGET
        except ContextOverflow:
            status = RunStatus.CONTEXT_FULL
        text = outcomes[-1].turn.content if outcomes else ""
        result = RunResult(status, text, tuple(records))
        emit(RunFinished(result))
        return result

    async def _steps(self, outcomes: list[StepOutcome], records: list[StepRecord], emit: Emit) -> RunStatus:
        guard = RepeatGuard(self._limits.repeats)
        for number in range(1, self._limits.max_steps + 1):
            emit(StepStarted(number))
            outcome = await step(
                self._client,
                self._registry,
                self.conversation,
                self._tools,
                guard=guard,
                record=self.conversation.append,
                emit=emit,
            )
            outcomes.append(outcome)
            records.append(_record(number, outcome))
            emit(StepFinished(records[-1]))
            status = self._ending(outcome, records, guard)
            if status is not None:
                return status
        return RunStatus.MAX_STEPS

    def _ending(self, outcome: StepOutcome, records: list[StepRecord], guard: RepeatGuard) -> RunStatus | None:
        """Why the run ends after this step, or None when it goes on."""
        turn = outcome.turn
        if not turn.tool_calls:
            if turn.finish_reason not in ("stop", "tool_calls"):
                return RunStatus.TRUNCATED
            return RunStatus.COMPLETED if turn.content.strip() else RunStatus.EMPTY_ANSWER
        if guard.exhausted:
            return RunStatus.REPEATED_CALLS
        budget = self._limits.token_budget
        if budget is not None and sum(record.spent_tokens for record in records) >= budget:
            return RunStatus.TOKEN_BUDGET
        return None

    def _close_open_calls(self) -> None:
        """Answer calls that a crash left open in a saved history."""
        for call in self.conversation.open_calls:
            result = cancelled(call)
            self.conversation.append(Message(role="tool", content=result.model, tool_call_id=call.id))


def _with_unique_ids(calls: Sequence[ToolCall], taken: frozenset[str]) -> tuple[ToolCall, ...]:
    """Replace ids that would mix results up: servers that number the calls of a request repeat them."""
    used = set(taken)
    unique: list[ToolCall] = []
    for call in calls:
        fresh = call if call.id and call.id not in used else replace(call, id=f"call_{uuid.uuid4().hex}")
        used.add(fresh.id)
        unique.append(fresh)
    return tuple(unique)


def _record(number: int, outcome: StepOutcome) -> StepRecord:
    turn, usage = outcome.turn, outcome.turn.usage
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
    )
