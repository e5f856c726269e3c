"""A model at the edge of the protocol that plays a script in process, for cases by the hundred and exact counts."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from agent_runtime.conversation import (
    AssistantTurn,
    ContentDelta,
    Delta,
    FinishReason,
    Message,
    ReasoningDelta,
    ToolCall,
    Usage,
)
from agent_runtime.model import CallOptions


@dataclass(frozen=True)
class Seen:
    """One call as the model got it."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    options: CallOptions


Answer: TypeAlias = AssistantTurn | Exception
Line: TypeAlias = "Answer | Callable[[Seen], Answer | Awaitable[Answer]]"


def turn(
    content: str = "",
    *calls: tuple[str, str],
    reasoning: str = "think",
    finish: FinishReason | None = None,
    usage: Usage | None = None,
    ids: str = "c",
) -> AssistantTurn:
    """An answer; calls are (name, JSON arguments)."""
    made = tuple(ToolCall(f"{ids}{n}", name, arguments) for n, (name, arguments) in enumerate(calls))
    reason: FinishReason = finish or ("tool_calls" if calls else "stop")
    return AssistantTurn(reasoning, content, made, reason, usage, 0.0, 0.0)


@dataclass
class ScriptedModel:
    """Answers with the lines of its script in order; the last one repeats. Keeps what it was asked."""

    script: list[Line]
    seen: list[Seen] = field(default_factory=list[Seen])
    count: Callable[[Seen, AssistantTurn], Usage] | None = None
    """Counts to report for a call and its answer; None reports what the script says."""

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        options: CallOptions | None = None,
        on_delta: Callable[[Delta], None] = lambda _: None,
    ) -> AssistantTurn:
        """One answer."""
        seen = Seen(tuple(messages), tuple(tools), options or CallOptions())
        self.seen.append(seen)
        line = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        answer = line(seen) if callable(line) else line
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        if answer.reasoning:
            on_delta(ReasoningDelta(answer.reasoning))
        if answer.content:
            on_delta(ContentDelta(answer.content))
        if self.count is not None:
            answer = replace(answer, usage=self.count(seen, answer))
        return answer

    @property
    def summaries(self) -> list[Seen]:
        """The calls that asked for a summary."""
        return [seen for seen in self.seen if is_summary(seen)]

    @property
    def steps(self) -> list[Seen]:
        """The calls that asked for the next step."""
        return [seen for seen in self.seen if not is_summary(seen)]


def is_summary(seen: Seen) -> bool:
    """Whether a call ends with the instruction for a summary."""
    return str(seen.messages[-1].content).startswith("The conversation is about to be shortened.")
