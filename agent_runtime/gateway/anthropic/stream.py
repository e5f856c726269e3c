"""The Messages API as a `Wire`: one message, or the events of a stream in their order."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from agent_runtime.gateway.anthropic.decode import Decoded
from agent_runtime.gateway.anthropic.encode import (
    NOT_ENDED,
    content_of,
    ending,
    message_id,
    message_object,
    notes_of,
    usage_object,
)
from agent_runtime.gateway.anthropic.errors import error_body, error_response, translated
from agent_runtime.gateway.completion import Began, ChoiceEnd, Facts, NewDelta, Progress, Usage, WireForm
from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.sse import event
from k3_sglang.chat.events import CallArgumentsDelta, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta

Json = dict[str, Any]


class MessagesWire:
    """The words of the Messages API for one completion."""

    protocol: WireForm = "messages"
    keep_alive = event({"type": "ping"}, "ping")

    def __init__(self, facts: Facts, decoded: Decoded) -> None:
        self._facts = facts
        self._decoded = decoded
        self._open: str | None = None
        self._blocks = 0

    @property
    def id(self) -> str:
        """The message's id."""
        return message_id(self._facts)

    @property
    def _request_id(self) -> str:
        return f"req_{self._facts.token}"

    def headers(self) -> Mapping[str, str]:
        """The request's id, which this API's clients show in their errors."""
        return {"request-id": self._request_id}

    def events(self, item: Progress) -> bytes:
        """``message_start``, the blocks, and ``message_delta`` at the end."""
        if isinstance(item, Began):
            usage = Usage(self._facts.prompt_tokens, item.cached_tokens, 0, 0)
            message = message_object(self._facts, [], usage_object(self._facts, usage), NOT_ENDED)
            return _event({"type": "message_start", "message": message})
        return self._delta(item.event) if isinstance(item, NewDelta) else self._end(item)

    def last_events(self, ends: Sequence[ChoiceEnd]) -> bytes:
        """``message_stop``."""
        return _event({"type": "message_stop"})

    def failure_events(self, error: ApiError) -> bytes:
        """``error``, the last event."""
        return _event(error_body(translated(error, self._decoded.places.translated), self._request_id))

    def whole(self, ends: Sequence[ChoiceEnd]) -> Json:
        """The message."""
        end = ends[0]
        content = content_of(end.delivered, self._facts.signatures[0], hides_thinking=self._decoded.hides_thinking)
        usage = usage_object(self._facts, end.usage)
        return {**message_object(self._facts, content, usage, ending(end.delivered)), **self._more(end)}

    def refusal(self, error: ApiError) -> Response:
        """The error envelope."""
        return error_response(translated(error, self._decoded.places.translated), self._request_id)

    def _delta(self, new: Event) -> bytes:
        match new:
            case ReasoningDelta(text):
                head = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                if self._decoded.hides_thinking:
                    return head
                return head + self._block_delta({"type": "thinking_delta", "thinking": text})
            case ContentDelta(text):
                head = self._begin("text", {"type": "text", "text": ""})
                return head + self._block_delta({"type": "text_delta", "text": text})
            case CallStart(_, call_id, name):
                block = {"type": "tool_use", "id": call_id, "name": name, "input": dict[str, Any]()}
                return self._close() + self._begin("tool_use", block)
            case CallArgumentsDelta(_, text):
                return self._block_delta({"type": "input_json_delta", "partial_json": text})
            case CallEnd():
                return self._close()
            case _:
                return b""

    def _begin(self, kind: str, block: Json) -> bytes:
        """The start of a block, unless one of its kind is open."""
        if self._open == kind:
            return b""
        head = self._close()
        self._open = kind
        self._blocks += 1
        return head + _event({"type": "content_block_start", "index": self._blocks - 1, "content_block": block})

    def _block_delta(self, delta: Json) -> bytes:
        return _event({"type": "content_block_delta", "index": self._blocks - 1, "delta": delta})

    def _close(self) -> bytes:
        """The end of the open block; thinking has its signature before it."""
        if self._open is None:
            return b""
        head = b""
        if self._open == "thinking":
            head = self._block_delta({"type": "signature_delta", "signature": self._facts.signatures[0]})
        self._open = None
        return head + _event({"type": "content_block_stop", "index": self._blocks - 1})

    def _end(self, end: ChoiceEnd) -> bytes:
        usage = usage_object(self._facts, end.usage)
        last = {"type": "message_delta", "delta": ending(end.delivered), "usage": usage, **self._more(end)}
        return self._close() + _event(last)

    def _more(self, end: ChoiceEnd) -> Json:
        more: Json = {"k3": notes_of(self._facts, end.usage, end.delivered, self._decoded.places)}
        if self._decoded.manages_context:
            more["context_management"] = {"applied_edits": list[Any]()}
        return more


def _event(value: Json) -> bytes:
    return event(value, str(value["type"]))
