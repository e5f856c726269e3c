"""The JSON of chat completions: one message, or chunks of a stream."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from agent_runtime.gateway.choice import Delivered
from agent_runtime.gateway.completion import Began, ChoiceEnd, Facts, NewDelta, Progress, Usage, WireForm
from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.notes import completion_notes, turn_notes
from agent_runtime.gateway.sse import KEEP_ALIVE_COMMENT, event
from k3_sglang.chat.events import CallArgumentsDelta, CallStart, ContentDelta, Event, ReasoningDelta
from k3_sglang.chat.types import Channel, ToolCall

DONE_EVENT = b"data: [DONE]\n\n"


class ChatWire:
    """OpenAI's chat completions. ``include_usage`` ends a stream with the counts."""

    protocol: WireForm = "chat"
    keep_alive = KEEP_ALIVE_COMMENT

    def __init__(self, facts: Facts, *, include_usage: bool) -> None:
        self._facts = facts
        self._include_usage = include_usage
        self._begun: set[int] = set()

    @property
    def id(self) -> str:
        """The id that every object of the completion repeats."""
        return f"chatcmpl-{self._facts.token}"

    def headers(self) -> Mapping[str, str]:
        """None of its own."""
        return {}

    def events(self, item: Progress) -> bytes:
        """The role when a choice has something to say, its deltas, and an empty delta with the reason at its end."""
        if isinstance(item, Began):
            return b""
        new = delta(item.event) if isinstance(item, NewDelta) else None
        if isinstance(item, NewDelta) and new is None:
            return b""
        head = b""
        if item.index not in self._begun:
            self._begun.add(item.index)
            head = self._delta(item.index, {"role": "assistant", "content": ""})
        return head + (self._end(item) if isinstance(item, ChoiceEnd) else self._delta(item.index, new or {}))

    def last_events(self, ends: Sequence[ChoiceEnd]) -> bytes:
        """The counts, if asked for, and the end."""
        if not self._include_usage:
            return DONE_EVENT
        return self._chunk([], usage=usage_object([end.usage for end in ends])) + DONE_EVENT

    def failure_events(self, error: ApiError) -> bytes:
        """Clients of OpenAI look for the key ``error``."""
        return event(error.body()) + DONE_EVENT

    def whole(self, ends: Sequence[ChoiceEnd]) -> dict[str, Any]:
        """The answer with all choices."""
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self._facts.created,
            "model": self._facts.model,
            "choices": [
                {
                    "index": end.index,
                    "message": _message(self._facts.start, end.delivered),
                    "finish_reason": end.delivered.finish_reason,
                    **_notes(end.delivered),
                }
                for end in ends
            ],
            "usage": usage_object([end.usage for end in ends]),
            "k3": completion_notes(self._facts, ends[0].usage),
        }

    def refusal(self, error: ApiError) -> Response:
        """OpenAI's envelope."""
        return error.response()

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self._facts.created,
            "model": self._facts.model,
        }
        return event({**head, "choices": choices, **more})

    def _delta(self, index: int, delta: dict[str, Any]) -> bytes:
        return self._chunk([{"index": index, "delta": delta, "finish_reason": None}])

    def _end(self, end: ChoiceEnd) -> bytes:
        delivered, nothing = end.delivered, dict[str, Any]()
        choice = {"index": end.index, "delta": nothing, "finish_reason": delivered.finish_reason, **_notes(delivered)}
        return self._chunk([choice], k3=completion_notes(self._facts, end.usage))


def delta(event: Event) -> dict[str, Any] | None:
    """The delta that says an event; None for what chat completions have no word for, as the end of a call."""
    match event:
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ContentDelta(text):
            return {"content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case _:
            return None


def usage_object(usages: Sequence[Usage]) -> dict[str, Any]:
    """OpenAI's ``usage``: the prompt counts once, the outputs of all choices add up."""
    first = usages[0]
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": first.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in usages)},
    }


def _message(start: Channel, delivered: Delivered) -> dict[str, Any]:
    message = delivered.message
    body: dict[str, Any] = {"role": "assistant"}
    if start == "think" or message.reasoning:
        body["reasoning_content"] = message.reasoning or ""
    body["content"] = message.content or (None if message.tool_calls else "")
    if message.tool_calls:
        body["tool_calls"] = [_call(call) for call in message.tool_calls]
    return body


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _notes(delivered: Delivered) -> dict[str, Any]:
    """Choice-level extension: only there when there is something to tell."""
    notes = turn_notes(delivered)
    return {"k3": notes} if notes else {}
