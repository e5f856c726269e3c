"""What a run reports: events while it goes on, one record per step, and the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from pydantic import BaseModel

from agent_runtime.conversation import CallDelta, ContentDelta, FinishReason, ReasoningDelta, ToolCall, Usage
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
    TOOL_BUDGET = "tool_budget"
    REPEATED_CALLS = "repeated_calls"
    """The model kept making the same call with the same result."""
    CONTEXT_FULL = "context_full"
    """The conversation no longer fits into the model's window."""
    MALFORMED_ANSWER = "malformed_answer"
    """The model wrote a call where no call can be, again after the retries."""
    INVALID_OUTPUT = "invalid_output"
    """The final answer does not follow the wanted form, again after the retries."""
    INTERRUPTED = "interrupted"
    """`Agent.interrupt` was called."""


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
    attempts: int = 1
    """Model calls it took: one, and one for each failed or unusable answer that was not kept."""
    wasted_tokens: int = 0
    """Tokens computed for answers that were not kept."""
    faults: tuple[str, ...] = ()
    """What was wrong with the answers, the one that was kept last."""

    @property
    def spent_tokens(self) -> int:
        """Tokens that had to be computed, for answers that were not kept too."""
        return computed_tokens(self.prompt_tokens, self.extend_tokens, self.completion_tokens) + self.wasted_tokens


def computed_tokens(prompt: int | None, extend: int | None, completion: int | None) -> int:
    """Uncached prompt and answer; a prompt counts whole when it is not known how much of it was cached."""
    return ((prompt if extend is None else extend) or 0) + (completion or 0)


@dataclass(frozen=True, slots=True)
class RunUsage:
    """Token counts of a whole run, summaries included; what endpoints did not report counts as 0."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def extend_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.prompt_tokens - self.cached_tokens

    def plus(self, usage: Usage | None) -> RunUsage:
        """The sum with one more model call."""
        if usage is None:
            return self
        return RunUsage(
            self.prompt_tokens + usage.prompt_tokens,
            self.cached_tokens + (usage.cached_tokens or 0),
            self.completion_tokens + usage.completion_tokens,
        )


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended."""

    status: RunStatus
    text: str
    """Text of the last answer; that of a finished answer only when `status` is COMPLETED."""
    steps: tuple[StepRecord, ...]
    usage: RunUsage = RunUsage()
    output: BaseModel | None = None
    """The answer as the model it was asked for, if one was and `status` is COMPLETED."""

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
class StepRetried:
    """An answer failed or was unusable and is asked for again; pieces of it that were reported do not count."""

    step: int
    attempt: int
    """Number of the attempt that failed, from 1."""
    reason: str


@dataclass(frozen=True, slots=True)
class CompressionStarted:
    """The history is about to be summarised."""

    context_tokens: int | None
    """Tokens of the next prompt; None when a full window made it necessary and nobody counted."""
    trigger_tokens: int


@dataclass(frozen=True, slots=True)
class CompressionFinished:
    """How an attempt to compress the history ended."""

    outcome: str
    """`compressed`, `nothing` or `failed`."""
    reason: str
    """Sizes, and on a failure what went wrong in each call."""
    calls: int
    """Model calls that were made."""
    before_tokens: int | None
    after_tokens: int | None
    """Tokens of the next prompt; None when they are known only after the next call."""
    summary_usage: Sequence[Usage]
    """Counts of each of those calls; how much of the prefix they reused is in `cached_tokens`."""


@dataclass(frozen=True, slots=True)
class RunFinished:
    """Last event of a run that ended without an exception."""

    result: RunResult


Event: TypeAlias = (
    StepStarted
    | ReasoningDelta
    | ContentDelta
    | CallDelta
    | ToolStarted
    | ToolFinished
    | StepRetried
    | StepFinished
    | CompressionStarted
    | CompressionFinished
    | RunFinished
)
Emit: TypeAlias = Callable[[Event], None]
