"""What a run reports: events while it goes on, one record per step, and the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from agent_runtime.conversation import CallDelta, ContentDelta, FinishReason, ReasoningDelta, ToolCall
from agent_runtime.tools.result import ToolResult


class RunStatus(StrEnum):
    """Why a run ended."""

    COMPLETED = "completed"
    """The model answered in text and called no tool."""
    EMPTY_ANSWER = "empty_answer"
    """The model ended its turn without text and without a call; there is no answer to hand out."""
    TRUNCATED = "truncated"
    """The answer was cut at the output limit, or withheld by a filter."""
    MAX_STEPS = "max_steps"
    TOKEN_BUDGET = "token_budget"
    TIME_BUDGET = "time_budget"
    REPEATED_CALLS = "repeated_calls"
    """The model kept making the same call with the same result."""
    CONTEXT_FULL = "context_full"
    """The conversation no longer fits into the model's window."""


@dataclass(frozen=True, slots=True)
class ToolRun:
    """A call and what it came to."""

    call: ToolCall
    result: ToolResult


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One model call and the tools it led to. Counts are None when the endpoint does not report them."""

    step: int
    """Number of the step in its run, from 1."""
    prompt_tokens: int | None
    cached_tokens: int | None
    extend_tokens: int | None
    """Prompt tokens that were not in the cache."""
    completion_tokens: int | None
    ttft_s: float | None
    duration_s: float
    finish_reason: FinishReason
    tools: tuple[ToolRun, ...]

    @property
    def spent_tokens(self) -> int:
        """Tokens that had to be computed: uncached prompt and answer; a prompt counts whole when unknown."""
        prompt = self.prompt_tokens if self.extend_tokens is None else self.extend_tokens
        return (prompt or 0) + (self.completion_tokens or 0)


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended."""

    status: RunStatus
    text: str
    """Text of the last answer; that of a finished answer only when `status` is COMPLETED."""
    steps: tuple[StepRecord, ...]

    @property
    def completed(self) -> bool:
        """Whether the model finished by itself with an answer."""
        return self.status is RunStatus.COMPLETED


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A model call is about to be made."""

    step: int


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """A tool begins to run."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class ToolFinished:
    """A call has its result, whether it was run or refused."""

    call: ToolCall
    result: ToolResult


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A step is complete and part of the history."""

    record: StepRecord


@dataclass(frozen=True, slots=True)
class RunFinished:
    """Last event of a run that ended without an exception."""

    result: RunResult


Event: TypeAlias = (
    StepStarted | ReasoningDelta | ContentDelta | CallDelta | ToolStarted | ToolFinished | StepFinished | RunFinished
)
Emit: TypeAlias = Callable[[Event], None]
