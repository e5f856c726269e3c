"""One run: steps from a task to an answer, within the limits, with the history compressed in time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import BaseModel

from agent_runtime.calls import Interrupted, cancelled
from agent_runtime.compression.count import ContextMeter
from agent_runtime.compression.run import Compressor
from agent_runtime.compression.trigger import clamp_output
from agent_runtime.conversation import Message, Usage
from agent_runtime.engine.chat_errors import ContextOverflow
from agent_runtime.events import (
    CompressionFinished,
    Emit,
    Event,
    RunFinished,
    RunResult,
    RunStatus,
    RunUsage,
    StepFinished,
    StepRecord,
    StepRetried,
    StepStarted,
)
from agent_runtime.faults import Fault
from agent_runtime.generation import Generated
from agent_runtime.history import History
from agent_runtime.limits import Limits
from agent_runtime.model import CallOptions, ModelClient
from agent_runtime.output import OutputForm
from agent_runtime.repeats import RepeatGuard
from agent_runtime.resume import Recovered
from agent_runtime.step import StepOutcome, StepParts, answer_calls, record, step
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tracing import span


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a run works with."""

    client: ModelClient
    registry: ToolRegistry
    history: History
    tools: Sequence[Mapping[str, Any]]
    meter: ContextMeter
    compressor: Compressor | None
    said: deque[str]
    """User messages to add at the next step boundary."""
    emit: Emit


class Run:
    """One run of an agent. `go` is called once."""

    def __init__(self, parts: RunParts, limits: Limits, recovered: Recovered | None = None) -> None:
        """`recovered` is the run of a log to go on with; None for a run whose task was just added."""
        self._parts = parts
        self._limits = limits
        self._recovered = recovered
        self._records: list[StepRecord] = [] if recovered is None else list(recovered.records)
        self._before_s = 0.0 if recovered is None else recovered.elapsed_s
        guard = RepeatGuard(limits.repeats) if recovered is None else recovered.guard(limits.repeats)
        self._step = StepParts(
            parts.client, parts.registry, parts.history, parts.tools, guard, limits.retries, self._emit
        )
        self._started = time.monotonic()
        self._usage = RunUsage()
        for known in self._records:
            if known.prompt_tokens is not None:
                usage = Usage(known.prompt_tokens, known.completion_tokens or 0, known.cached_tokens)
                self._usage = self._usage.plus(usage)
        self._other_tokens = 0  # computed for summaries and by sub-agents
        self._overflows = 0
        self._interrupted = False
        self._timer: asyncio.Timeout | None = None
        self._text = ""
        self._form: OutputForm | None = None

    def add_usage(self, usage: RunUsage) -> None:
        """Count what a sub-agent used."""
        self._usage = RunUsage(
            self._usage.prompt_tokens + usage.prompt_tokens,
            self._usage.cached_tokens + usage.cached_tokens,
            self._usage.completion_tokens + usage.completion_tokens,
        )
        self._other_tokens += usage.extend_tokens + usage.completion_tokens

    def interrupt(self, *, now: bool) -> None:
        """End the run after the current step, or at once."""
        self._interrupted = True
        if now and self._timer is not None and not self._timer.expired():
            self._timer.reschedule(asyncio.get_running_loop().time())

    async def go(self, output: type[BaseModel] | None) -> RunResult:
        """Run to the end. Raises ChatError and asyncio.CancelledError, with the history valid."""
        self._form = None if output is None else OutputForm(output)
        budget = self._limits.time_budget_s
        left = None if budget is None else max(0.0, budget - self._before_s)
        self._timer = asyncio.timeout(left)
        try:
            async with self._timer:
                status = await self._steps()
        except TimeoutError:
            if not self._timer.expired():
                raise
            status = RunStatus.INTERRUPTED if self._interrupted else RunStatus.TIME_BUDGET
        except ContextOverflow:
            status = RunStatus.CONTEXT_FULL
        self._parts.history.run_ends(status)
        made = self._form.value if self._form is not None and status is RunStatus.COMPLETED else None
        result = RunResult(status, self._text, tuple(self._records), self._usage, made)
        self._parts.emit(RunFinished(result))
        return result

    async def _steps(self) -> RunStatus:
        status = None
        if self._recovered is not None and self._recovered.turn is not None:
            status = await self._finish_step(self._recovered)
        while status is None:
            if self._interrupted:
                return RunStatus.INTERRUPTED
            if len(self._records) >= self._limits.max_steps:
                return RunStatus.MAX_STEPS
            self._add_user_messages()
            await self._compress_if_due()
            status = await self._one_step(len(self._records) + 1)
        return status

    async def _one_step(self, number: int) -> RunStatus | None:
        """A step, and why the run ends after it. When the window was full, the history is compressed instead."""
        parts = self._parts
        parts.emit(StepStarted(number))

        def retried(attempt: int, reason: str) -> None:
            parts.emit(StepRetried(number, attempt, reason))

        try:
            with span("step", number=number):
                outcome = await step(
                    self._step,
                    self._options(),
                    allowance=self._calls_left(),
                    on_retry=retried,
                    on_answer=self._answered,
                )
        except ContextOverflow:
            if not await self._made_room():
                raise
            return None
        return self._complete(number, outcome)

    async def _finish_step(self, recovered: Recovered) -> RunStatus | None:
        """Complete the step in which the process of the log ended."""
        turn = recovered.turn
        assert turn is not None
        known = [recovered.calls[call.id] for call in turn.tool_calls]
        before = Interrupted(
            {position: call.result for position, call in enumerate(known) if call.result is not None},
            frozenset(position for position, call in enumerate(known) if call.started),
        )
        left = self._calls_left()
        allowance = None if left is None else max(0, left - len(before.started))
        tools = await answer_calls(self._step, turn, allowance=allowance, before=before)
        outcome = StepOutcome(Generated(turn, ()), tools)
        self._text = turn.content
        self._usage = self._usage.plus(turn.usage)
        return self._complete(len(self._records) + 1, outcome)

    def _answered(self, generated: Generated) -> None:
        turn = generated.turn
        self._text = turn.content
        self._usage = self._usage.plus(turn.usage)
        if turn.usage is not None:
            self._parts.meter.calibrate(generated.sent, self._parts.tools, turn.usage.prompt_tokens)
        if generated.window == self._parts.history.window.number:
            self._parts.meter.observe(generated.sent, turn)
        else:
            self._parts.meter.reset()  # compressed meanwhile: the report is about another prompt

    def _complete(self, number: int, outcome: StepOutcome) -> RunStatus | None:
        made = record(number, outcome)
        self._records.append(made)
        status = self._ending(outcome)
        facts = asdict(replace(made, tools=()))
        del facts["tools"]  # they are in the log already
        self._parts.history.step_ends(facts, self._before_s + time.monotonic() - self._started, status)
        self._parts.emit(StepFinished(made))
        return status

    def _ending(self, outcome: StepOutcome) -> RunStatus | None:
        """Why the run ends after this step, or None when it goes on."""
        turn = outcome.turn
        if not turn.tool_calls:
            return self._after_answer(outcome)
        if self._step.guard.exhausted:
            return RunStatus.REPEATED_CALLS
        if self._calls_left() == 0:
            return RunStatus.TOOL_BUDGET
        budget = self._limits.token_budget
        spent = self._other_tokens + sum(record.spent_tokens for record in self._records)
        return RunStatus.TOKEN_BUDGET if budget is not None and spent >= budget else None

    def _after_answer(self, outcome: StepOutcome) -> RunStatus | None:
        turn, fault = outcome.turn, outcome.generated.fault
        if turn.finish_reason not in ("stop", "tool_calls"):
            return RunStatus.TRUNCATED
        if fault is Fault.SWALLOWED_CALL:
            return RunStatus.MALFORMED_ANSWER
        if not turn.content.strip():
            return RunStatus.EMPTY_ANSWER
        if self._parts.said:
            return None
        if self._form is None or self._form.accepts(turn.content):
            return RunStatus.COMPLETED
        return RunStatus.INVALID_OUTPUT if self._form.tries >= self._limits.output_tries else None

    def _options(self) -> CallOptions:
        parts = self._parts
        wanted = self._form.response_format if self._form is not None and self._form.asked else None
        window = None if parts.compressor is None else parts.compressor.settings.window_tokens
        most = None if window is None else parts.meter.bound(parts.history.conversation.messages, parts.tools)
        return CallOptions(
            max_output_tokens=clamp_output(None, most, window),
            response_format=wanted,
            session=parts.history.session,
        )

    def _calls_left(self) -> int | None:
        if self._limits.tool_calls is None:
            return None
        return max(0, self._limits.tool_calls - sum(len(record.tools) for record in self._records))

    def _add_user_messages(self) -> None:
        """What was said meanwhile; else, behind an answer that is not in the wanted form, the request for that form."""
        history = self._parts.history
        last = history.conversation.messages[-1]
        if not self._parts.said and self._form is not None and last.role == "assistant" and not last.tool_calls:
            self._form.accepts(str(last.content))  # after a resume nobody has looked at it yet
            history.append(Message(role="user", content=self._form.request()))
        while self._parts.said:
            history.append(Message(role="user", content=self._parts.said.popleft()))

    async def _compress_if_due(self) -> None:
        if self._parts.compressor is not None:
            self._count_summary(await self._parts.compressor.compress_if_due(self._parts.emit))

    async def _made_room(self) -> bool:
        """Compress because the endpoint says that the window is full; whether the next prompt is a shorter one."""
        compressor = self._parts.compressor
        if compressor is None or self._overflows >= compressor.settings.max_overflows:
            return False
        self._overflows += 1
        finished = await compressor.compress(self._parts.emit)
        self._count_summary(finished)
        return finished.outcome == "compressed"

    def _count_summary(self, finished: CompressionFinished | None) -> None:
        for usage in () if finished is None else finished.summary_usage:
            self._usage = self._usage.plus(usage)
            self._other_tokens += (usage.extend_tokens or usage.prompt_tokens) + usage.completion_tokens

    def _emit(self, event: Event) -> None:
        self._parts.emit(event)


def close_open_calls(history: History) -> None:
    """Answer calls that a crash left open, when another run begins instead of going on with theirs."""
    for call in history.conversation.open_calls:
        history.append(Message(role="tool", content=cancelled(call).model, tool_call_id=call.id))
