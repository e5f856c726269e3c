"""Put the pieces of a streamed chat completion together into one assistant turn."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall

from agent_runtime.conversation import (
    AssistantTurn,
    CallDelta,
    ContentDelta,
    Delta,
    FinishReason,
    ReasoningDelta,
    ToolCall,
    Usage,
)
from agent_runtime.engine.chat_errors import ChatProtocolError, PartialTurn

_FINISH_REASONS: Final[tuple[FinishReason, ...]] = ("stop", "tool_calls", "length", "content_filter")
# The key K3 endpoints use, and the one of endpoints that follow a newer dialect.
_REASONING_KEYS: Final = ("reasoning_content", "reasoning")


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list[str])
    arguments_chars: int = 0


class TurnBuilder:
    """Gathers text per channel and calls per index; names and arguments may come in any number of pieces."""

    def __init__(self, on_delta: Callable[[Delta], None]) -> None:
        self.started = time.monotonic()
        """When the request was sent, on the monotonic clock."""
        self._on_delta = on_delta
        self._first: float | None = None
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._finish_reason: FinishReason | None = None
        self._usage: Usage | None = None

    @property
    def finished(self) -> bool:
        """Whether the finish reason has arrived."""
        return self._finish_reason is not None

    def add(self, chunk: ChatCompletionChunk) -> None:
        """Take one chunk.

        Raises:
            ChatProtocolError: more than one choice, or an unknown finish reason.
        """
        if chunk.usage is not None:
            self._usage = _usage(chunk.usage)
        for choice in chunk.choices or ():
            if choice.index != 0:
                raise ChatProtocolError(f"the answer has a choice with index {choice.index}; one choice was asked for")
            self._add_delta(choice.delta)
            if choice.finish_reason is not None:
                self._finish_reason = _finish_reason(choice.finish_reason)

    def turn(self, duration_s: float) -> AssistantTurn:
        """The complete turn; only after `finished`.

        Raises:
            ChatProtocolError: no finish reason has arrived, or a call has no name though the answer was not cut.
        """
        if self._finish_reason is None:
            raise ChatProtocolError("the answer has no finish reason")
        partial = self.partial()
        named = tuple(call for call in partial.tool_calls if call.name)
        # A call that was cut before its name says nothing, and no endpoint would take it back.
        if len(named) < len(partial.tool_calls) and self._finish_reason in ("stop", "tool_calls"):
            raise ChatProtocolError("the answer has a tool call without a name")
        return AssistantTurn(
            reasoning=partial.reasoning,
            content=partial.content,
            tool_calls=named,
            finish_reason=self._finish_reason,
            usage=self._usage,
            ttft_s=None if self._first is None else self._first - self.started,
            duration_s=duration_s,
        )

    def partial(self) -> PartialTurn:
        """Everything that has arrived so far."""
        calls = tuple(
            ToolCall(call.id or f"call_{uuid.uuid4().hex}", call.name, _joined(call.arguments))
            for _, call in sorted(self._calls.items())
        )
        return PartialTurn(_joined(self._reasoning), _joined(self._content), calls)

    def _add_delta(self, delta: ChoiceDelta | None) -> None:
        if delta is None:
            return
        reasoning = _reasoning(delta)
        if reasoning:
            self._arrived(ReasoningDelta(reasoning))
            self._reasoning.append(reasoning)
        if delta.content:
            self._arrived(ContentDelta(delta.content))
            self._content.append(delta.content)
        for piece in delta.tool_calls or ():
            self._add_call(piece)

    def _add_call(self, piece: ChoiceDeltaToolCall) -> None:
        call = self._calls.setdefault(piece.index, _Call())
        call.id = call.id or piece.id or ""
        if piece.function is not None:
            call.name += piece.function.name or ""
            text = piece.function.arguments or ""
            call.arguments.append(text)
            call.arguments_chars += len(text)
        self._arrived(CallDelta(piece.index, call.name, call.arguments_chars))

    def _arrived(self, delta: Delta) -> None:
        if self._first is None:
            self._first = time.monotonic()
        self._on_delta(delta)


def _joined(pieces: Sequence[str]) -> str:
    """The pieces as one text that a request can carry.

    Servers that count in UTF-16 cut an astral character into two halves; half a pair that stays alone has no UTF-8
    form and becomes U+FFFD.
    """
    text = "".join(pieces)
    return text if text.isascii() else text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _reasoning(delta: ChoiceDelta) -> str:
    extra: dict[str, Any] = delta.model_extra or {}
    return next((extra[key] for key in _REASONING_KEYS if isinstance(extra.get(key), str) and extra[key]), "")


def _usage(usage: CompletionUsage) -> Usage:
    details = usage.prompt_tokens_details
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=None if details is None else details.cached_tokens,
    )


def _finish_reason(reason: str) -> FinishReason:
    if reason not in _FINISH_REASONS:
        raise ChatProtocolError(f"finish_reason {reason!r} is unknown; known: {', '.join(_FINISH_REASONS)}")
    return reason
