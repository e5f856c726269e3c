"""Exact token counts of the next prompt: from what the endpoint reported, and from K3's encoder for what came after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agent_runtime.conversation import AssistantTurn, Message
from k3_sglang.chat.encode import encode_ids
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, Effort

_STUB_TOKENS: Final = 3
"""Ids of the stub that opens the think channel; Moonshot's API and SGLang's chat endpoint leave them out."""


_MARKUP_TOKENS: Final = 200
"""More than the markers and attributes around a message: a tool's name has at most 64 bytes."""


class ContextMeter(Protocol):
    """Counts tokens of prompts; never estimates."""

    def observe(self, sent: Sequence[Message], turn: AssistantTurn) -> None:
        """A request with these messages was answered with this turn, which is now their successor."""
        ...

    def calibrate(self, sent: Sequence[Message], tools: Sequence[Mapping[str, Any]], prompt_tokens: int) -> None:
        """The endpoint reported so many tokens for a prompt with these messages."""
        ...

    def count(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int | None:
        """Tokens of the prompt of the next step; None when they are not known."""
        ...

    def bound(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int | None:
        """At most so many tokens has the prompt of the next step; None when they are not known."""
        ...

    def text_tokens(self, text: str) -> int:
        """Tokens of a text, or an upper bound."""
        ...

    def reset(self) -> None:
        """The history was replaced: what was reported before says nothing about it."""
        ...

    def fork(self) -> ContextMeter:
        """A meter for another history that may begin like this one."""
        ...


@dataclass(frozen=True, slots=True)
class _Anchor:
    """A start of the history whose tokens the endpoint has counted: so many messages, the answer included."""

    messages: int
    tokens: int


class UsageMeter:
    """For endpoints without a local tokenizer: the last reported prompt and answer.

    That is exact for everything the endpoint has seen and leaves out what was added since, so a trigger is noticed one
    step later. A text is measured by its UTF-8 bytes: no token is shorter than a byte.
    """

    def __init__(self) -> None:
        self._anchor: _Anchor | None = None

    def observe(self, sent: Sequence[Message], turn: AssistantTurn) -> None:
        usage = turn.usage
        if usage is not None:
            self._anchor = _Anchor(len(sent) + 1, usage.prompt_tokens + usage.completion_tokens)

    def calibrate(self, sent: Sequence[Message], tools: Sequence[Mapping[str, Any]], prompt_tokens: int) -> None:
        """Nothing to learn: what is reported is what counts."""

    def count(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int | None:
        return None if self._anchor is None else self._anchor.tokens

    def bound(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int | None:
        if self._anchor is None:
            return None
        new = messages[self._anchor.messages :]
        return self._anchor.tokens + sum(self.text_tokens(str(m.content)) + _MARKUP_TOKENS for m in new) + _STUB_TOKENS

    def text_tokens(self, text: str) -> int:
        return len(text.encode("utf-8", "replace"))

    def reset(self) -> None:
        self._anchor = None

    def fork(self) -> UsageMeter:
        return UsageMeter()


class EncoderMeter:
    """With the model's tokenizer: reported tokens of what the endpoint has seen, encoded tokens of what came after.

    Messages are encoded one by one, so the sum is the whole. Before the first report, after an answer that was cut, and
    in a new window everything is encoded.
    """

    def __init__(self, tokenizer: K3Tokenizer, effort: Effort | None = "max") -> None:
        """`effort` is the one the endpoint renders; the session must use the same."""
        self._tokenizer = tokenizer
        self._effort: Effort | None = effort
        self._cache = EncodeCache()
        self._anchor: _Anchor | None = None
        self._unreported = 0
        """Tokens of each prompt that the endpoint does not report."""

    def observe(self, sent: Sequence[Message], turn: AssistantTurn) -> None:
        usage = turn.usage
        if usage is None or turn.finish_reason not in ("stop", "tool_calls") or turn.empty:
            self._anchor = None
            return
        self._anchor = _Anchor(len(sent) + 1, usage.prompt_tokens + self._unreported + usage.completion_tokens)

    def calibrate(self, sent: Sequence[Message], tools: Sequence[Mapping[str, Any]], prompt_tokens: int) -> None:
        """Learn from a prompt without assistant turns whether the endpoint reports the stub."""
        if any(message.role == "assistant" for message in sent):
            return
        encoded = self._encoded(sent, tools)
        self._unreported = _STUB_TOKENS if encoded - prompt_tokens == _STUB_TOKENS else 0

    def count(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int | None:
        anchor = self._anchor
        if anchor is None or len(messages) < anchor.messages:
            return self._encoded(messages, tools)
        answer = messages[anchor.messages - 1]
        with_new = ChatRequest((answer, *messages[anchor.messages :]), effort=None)
        alone = ChatRequest((answer,), effort=None, add_generation_prompt=False)
        return anchor.tokens + self._len(with_new) - self._len(alone)

    def bound(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int | None:
        return self.count(messages, tools)

    def text_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode_text(text))

    def reset(self) -> None:
        self._anchor = None

    def fork(self) -> EncoderMeter:
        made = EncoderMeter(self._tokenizer, self._effort)
        made._cache, made._unreported = self._cache, self._unreported
        return made

    def _encoded(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> int:
        declared = tuple(dict(tool) for tool in tools)
        return self._len(ChatRequest(tuple(messages), declared, effort=self._effort))

    def _len(self, request: ChatRequest) -> int:
        return len(encode_ids(request, self._tokenizer, self._cache))
