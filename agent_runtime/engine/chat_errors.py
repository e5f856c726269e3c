"""What can go wrong with a chat endpoint, as one tree.

ChatError                       root; a subclass of AgentRuntimeError
├── EndpointUnreachable         nobody answers at the address
├── RequestRefused              4xx: the same request would be refused again
│   └── ContextOverflow         4xx because the conversation is longer than the model's window
├── EndpointFailed              5xx, or 408 and 429: the endpoint could not do its work now
├── StreamBroken                an answer began and did not come to its end
└── ChatProtocolError           the answer does not follow the API
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import openai

from agent_runtime.conversation import ToolCall
from agent_runtime.errors import AgentRuntimeError


class ChatError(AgentRuntimeError):
    """A model call failed."""


class EndpointUnreachable(ChatError):
    """No connection could be made; nothing was sent."""

    def __init__(self, base_url: str, tries: int, reason: str) -> None:
        super().__init__(
            f"nothing answers at {base_url} ({tries} tries: {reason}); start a server there, "
            "for example with `python -m k3_sglang.launch --model tiny`, or give another base URL"
        )
        self.base_url = base_url


class RequestRefused(ChatError):
    """The endpoint refused the request; `code` and `param` are from its error body."""

    def __init__(self, message: str, *, status: int, code: str | None, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class ContextOverflow(RequestRefused):
    """The conversation no longer fits into the model's window."""


class EndpointFailed(ChatError):
    """The endpoint answered with a server error, or that it has too much to do.

    `retry_after_s` is how long it asks to wait; None when it does not say.
    """

    def __init__(self, message: str, *, status: int, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class PartialTurn:
    """What had arrived of an answer when it broke off. Its calls must not be executed."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]


class StreamBroken(ChatError):
    """The answer did not come to its end; `partial` is what had arrived."""

    def __init__(self, message: str, partial: PartialTurn | None = None) -> None:
        super().__init__(message)
        self.partial = partial or PartialTurn("", "", ())


class ChatProtocolError(ChatError):
    """The answer cannot be understood."""


def from_openai(error: openai.OpenAIError, base_url: str) -> ChatError:
    """Our error for one of the client library's."""
    if not isinstance(error, openai.APIStatusError):
        return ChatProtocolError(f"{base_url}: {error}")
    status = error.status_code
    message = f"{base_url} answered {status}: {_message(error)}"
    if status >= 500 or status in (408, 429):
        return EndpointFailed(message, status=status, retry_after_s=_retry_after_s(error))
    kind = ContextOverflow if error.code == "context_length_exceeded" else RequestRefused
    return kind(message, status=status, code=error.code, param=error.param)


def _retry_after_s(error: openai.APIStatusError) -> float | None:
    """Seconds of a `retry-after` header; dates are rare and left out."""
    try:
        seconds = float(error.response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def _message(error: openai.APIStatusError) -> str:
    """The endpoint's own words; the library keeps the inner object of an OpenAI-shaped body in `body`."""
    body: Any = error.body
    if isinstance(body, dict):
        said = cast(dict[str, Any], body).get("message")
        if isinstance(said, str):
            return said
    return error.response.text[:300] or "(empty body)"
