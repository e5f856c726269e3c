"""What the loop needs of a model: one call with a whole history, and the options that differ from call to call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from agent_runtime.conversation import AssistantTurn, Delta, Message


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What is particular to one call. None of it moves the prompt before its last message."""

    max_output_tokens: int | None = None
    """Output limit; the smaller of this and the client's own counts."""
    tool_choice: Literal["none", "required"] | None = None
    response_format: Mapping[str, Any] | None = None
    session: str | None = None
    """Name of the conversation for the endpoint; sent as a header, so that any endpoint may ignore it."""

    def logged(self) -> dict[str, Any]:
        """The options that are part of a request's body, as a run log keeps them."""
        values = {
            "max_output_tokens": self.max_output_tokens,
            "tool_choice": self.tool_choice,
            "response_format": self.response_format,
        }
        return {name: value for name, value in values.items() if value is not None}


class ModelClient(Protocol):
    """A model with a history as input; `ChatClient` is one."""

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = ...,
        *,
        options: CallOptions | None = ...,
        on_delta: Callable[[Delta], None] = ...,
    ) -> AssistantTurn:
        """One complete answer to `messages`; must not modify its arguments."""
        ...


@runtime_checkable
class PrefixHints(Protocol):
    """A model client whose endpoint may be told about its prefix cache; `ChatClient` is one."""

    async def abandon(self, session: str, from_tokens: int) -> bool:
        """The session will hardly go on behind a position of its prompt; whether anybody listened. Never raises for
        an endpoint that does not."""
        ...
