"""The JSON of chat completions: one message, or chunks of a stream."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agent_runtime.gateway.choice import Delivered, Delta
from agent_runtime.gateway.errors import ApiError
from agent_runtime.guard.verdict import Replay
from k3_sglang.chat.types import Channel, ToolCall

DONE_EVENT = b"data: [DONE]\n\n"
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"
MAX_NOTES = 16
MAX_NOTE_CHARS = 300
"""Bounds of what an answer says about its schemas, which come from the client."""
_LINE_ENDS = {point: f"\\u{point:04x}" for point in (0x85, 0x2028, 0x2029)}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice; ``cached_tokens`` are the prompt tokens the engine did not compute again.

    ``cache`` is what the engine's cache says about them: why there were not more.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cache: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every object of one completion repeats.

    ``loosened`` names what the request's schemas demand and its grammar could not hold the model to; ``session`` is
    how the cache's control routes name the session, ``hinted`` whether the engine's cache was told anything.
    """

    id: str
    created: int
    model: str
    replay: Replay
    loosened: tuple[str, ...] = ()
    session: str | None = None
    hinted: bool = False

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """One event of a stream."""
        head = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
        }
        return event({**head, "choices": choices, **more})

    def delta(self, index: int, delta: Delta) -> bytes:
        """An event with new text or a piece of a call."""
        return self.chunk([{"index": index, "delta": delta, "finish_reason": None}])

    def end(self, index: int, delivered: Delivered, usage: Usage) -> bytes:
        """The last event of one choice: an empty delta and the reason."""
        nothing: Delta = {}
        choice = {"index": index, "delta": nothing, "finish_reason": delivered.finish_reason, **_notes(delivered)}
        return self.chunk([choice], k3=self._k3(usage))

    def usage(self, usages: Sequence[Usage]) -> bytes:
        """The event with the counts, after all choices."""
        return self.chunk([], usage=usage_object(usages))

    def completion(self, start: Channel, choices: Sequence[Delivered], usages: Sequence[Usage]) -> dict[str, Any]:
        """The whole answer as one object."""
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [
                {
                    "index": index,
                    "message": _message(start, delivered),
                    "finish_reason": delivered.finish_reason,
                    **_notes(delivered),
                }
                for index, delivered in enumerate(choices)
            ],
            "usage": usage_object(usages),
            "k3": self._k3(usages[0]),
        }

    def _k3(self, usage: Usage) -> dict[str, Any]:
        cache: dict[str, Any] = {**usage.cache, "cached_tokens": usage.cached_tokens, "hinted": self.hinted}
        if self.session is not None:
            cache["session"] = self.session
        facts: dict[str, Any] = {"replay": self.replay.facts(), "cache": cache}
        if self.loosened:
            facts["loosened"] = [note[:MAX_NOTE_CHARS] for note in self.loosened[:MAX_NOTES]]
        return facts


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event.

    Some clients end lines where Unicode does, so those characters are escaped; JSON escapes the others anyway.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS)
    return f"data: {text}\n\n".encode()


def error_event(error: ApiError) -> bytes:
    """A failure after the stream has begun: clients of OpenAI look for the key ``error``."""
    return event(error.body())


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
    notes: dict[str, Any] = {}
    if delivered.incomplete_calls:
        notes["incomplete_tool_calls"] = [asdict(call) for call in delivered.incomplete_calls]
    if delivered.schema_problems:
        notes["schema_problems"] = [note[:MAX_NOTE_CHARS] for note in delivered.schema_problems[:MAX_NOTES]]
    if delivered.warnings:
        notes["warnings"] = list(delivered.warnings)
    return {"k3": notes} if notes else {}
