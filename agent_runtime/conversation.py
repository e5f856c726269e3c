"""The agent's history: append-only, and what is saved is what the model sees."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from agent_runtime.errors import AgentRuntimeError
from k3_sglang.chat.events import ContentDelta, ReasoningDelta
from k3_sglang.chat.types import Message, ToolCall

__all__ = [
    "AssistantTurn",
    "CallDelta",
    "ContentDelta",
    "Conversation",
    "ConversationError",
    "Delta",
    "FinishReason",
    "Message",
    "ReasoningDelta",
    "ToolCall",
    "Usage",
    "from_wire",
    "to_wire",
]

WireMessage: TypeAlias = dict[str, Any]
FinishReason: TypeAlias = Literal["stop", "tool_calls", "length", "content_filter"]


class ConversationError(AgentRuntimeError):
    """A message does not continue the history; the message says what is expected next."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A call in the making: the name, and how many characters of arguments have come so far."""

    index: int
    name: str
    arguments_chars: int


Delta: TypeAlias = ReasoningDelta | ContentDelta | CallDelta


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one model call as the endpoint reports them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """Prompt tokens the engine reused; None when the endpoint does not say."""

    @property
    def extend_tokens(self) -> int | None:
        """Prompt tokens the engine had to compute; None when the endpoint does not say."""
        return None if self.cached_tokens is None else self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """One complete answer of the model: thinking, text and calls belong together and go back together."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    usage: Usage | None
    ttft_s: float | None
    """Seconds from sending the request to the first piece of the answer; None when the answer is empty."""
    duration_s: float
    """Seconds from sending the request to the end of the answer."""

    @property
    def empty(self) -> bool:
        """Whether the model produced nothing that could be kept."""
        return not (self.reasoning or self.content or self.tool_calls)

    def message(self) -> Message:
        """The whole turn as one message of the history."""
        return Message(
            role="assistant",
            content=self.content,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
        )


class Conversation:
    """Messages in the order the model saw them. There is no way to change or remove one."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._messages: list[Message] = []
        self._open: dict[str, ToolCall] = {}
        self._call_ids: set[str] = set()
        for message in messages:
            self.append(message)

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages so far."""
        return tuple(self._messages)

    @property
    def open_calls(self) -> tuple[ToolCall, ...]:
        """Calls of the last assistant message that have no result yet, in order."""
        return tuple(self._open.values())

    @property
    def call_ids(self) -> frozenset[str]:
        """Every call id of the history."""
        return frozenset(self._call_ids)

    def append(self, message: Message) -> None:
        """Add a message; calls and results stay paired.

        Raises:
            ConversationError: see `check`.
        """
        self.check(message)
        if message.role == "tool":
            del self._open[str(message.tool_call_id)]
        elif message.role == "assistant":
            self._call_ids.update(call.id for call in message.tool_calls)
            self._open = {call.id: call for call in message.tool_calls}
        self._messages.append(message)

    def check(self, message: Message) -> None:
        """Whether `append` would take the message; nothing is changed.

        Raises:
            ConversationError: a call waits for its result and `message` is none, `message` is a result
                nobody waits for, a user message is blank, an assistant message is empty or repeats a call
                id, tools are declared by anything but a system message without text, or the content holds
                half of a surrogate pair.
        """
        _check_sendable(message)
        if message.tools is not None:
            _check_declaration(message)
        if message.role == "tool":
            if message.tool_call_id not in self._open:
                raise ConversationError(
                    f"result for call {message.tool_call_id!r}; calls that wait for one: {list(self._open)}"
                )
        elif self._open:
            raise ConversationError(
                f"{message.role} message while calls {list(self._open)} wait; append their results first"
            )
        elif message.role == "assistant":
            self._check_assistant(message)
        elif message.role == "user" and not (message.content and str(message.content).strip()):
            raise ConversationError("blank user message; the model would answer it with a repeated step")

    def check_task(self, text: str) -> None:
        """Whether `text` can be a user message; raises as `check` does, whatever waits for a result."""
        Conversation().check(Message(role="user", content=text))

    def wire(self) -> list[WireMessage]:
        """The messages as a request carries them."""
        return [to_wire(message) for message in self._messages]

    def dump(self) -> str:
        """The history as JSON lines, one wire message each."""
        return "".join(json.dumps(message, ensure_ascii=False) + "\n" for message in self.wire())

    @classmethod
    def load(cls, text: str) -> Conversation:
        """Read what `dump` wrote.

        Raises:
            ConversationError: a line is no message, or the messages do not continue each other.
        """
        lines = (line for line in text.split("\n") if line)
        return cls(from_wire(_parse(line, number)) for number, line in enumerate(lines, start=1))

    def _check_assistant(self, message: Message) -> None:
        if not (message.content or message.reasoning or message.tool_calls):
            raise ConversationError("empty assistant message; endpoints refuse it, so it must not enter the history")
        ids = [call.id for call in message.tool_calls]
        if len({*ids} - {""}) < len(ids) or self._call_ids.intersection(ids):
            raise ConversationError(f"call ids {ids} are empty or not unique in this conversation")


def _check_sendable(message: Message) -> None:
    """A history can only grow, so what no request can carry must not get into it."""
    try:
        str(message.content).encode()
    except UnicodeEncodeError as error:
        raise ConversationError(
            f"{message.role} message with half of a surrogate pair, which has no UTF-8 form; "
            "decode it with errors='replace' first"
        ) from error


def _check_declaration(message: Message) -> None:
    if message.role != "system" or message.content is not None or not message.tools:
        raise ConversationError(
            f"{message.role} message that declares {len(message.tools or ())} tools; "
            "a declaration is a system message with at least one tool and without content"
        )


def to_wire(message: Message) -> WireMessage:
    """A message as OpenAI-shaped JSON.

    An assistant message always carries its thinking, even when that is empty: one without the key would be
    rendered just the same, and nobody would notice what was lost.

    Raises:
        ConversationError: the content is not plain text.
    """
    if not (message.content is None or isinstance(message.content, str)):
        raise ConversationError(f"{message.role} message with a list as content; the agent sends plain text only")
    if message.tools is not None:
        return {"role": message.role, "tools": list(message.tools)}
    wire: WireMessage = {"role": message.role, "content": message.content}
    if message.role == "assistant":
        wire["content"] = message.content or ""
        wire["reasoning_content"] = message.reasoning or ""
        if message.tool_calls:
            wire["tool_calls"] = [_call_to_wire(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        wire["name"] = message.name
    return wire


def from_wire(wire: WireMessage) -> Message:
    """The inverse of `to_wire`.

    Raises:
        ConversationError: a key is missing, unknown or of the wrong kind.
    """
    known = {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "tools"}
    if wire.get("role") not in ("system", "user", "assistant", "tool") or not known.issuperset(wire):
        raise ConversationError(f"not a saved message: keys {sorted(wire)}; allowed {sorted(known)} and a known role")
    try:
        calls = tuple(
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in wire.get("tool_calls", [])
        )
    except (KeyError, TypeError) as error:
        raise ConversationError(f"a saved tool call is incomplete: {error!r}") from error
    return Message(
        role=wire["role"],
        content=wire.get("content"),
        reasoning=wire.get("reasoning_content"),
        tool_calls=calls,
        tool_call_id=wire.get("tool_call_id"),
        name=wire.get("name"),
        tools=tuple(wire["tools"]) if "tools" in wire else None,
    )


def _call_to_wire(call: ToolCall) -> WireMessage:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _parse(line: str, number: int) -> WireMessage:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ConversationError(f"line {number} of a saved conversation is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConversationError(f"line {number} of a saved conversation is not a JSON object")
    return cast(WireMessage, value)
