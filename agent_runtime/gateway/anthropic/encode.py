"""A finished completion as a message of this API."""

import json
import math
from typing import Any

from agent_runtime.gateway.anthropic.places import Places
from agent_runtime.gateway.choice import Delivered
from agent_runtime.gateway.completion import Facts, Usage
from agent_runtime.gateway.notes import completion_notes, turn_notes
from k3_sglang.chat.cache_marks import TTL_S

Json = dict[str, Any]


def message_id(facts: Facts) -> str:
    """Never the same twice: clients join messages of one id."""
    return f"msg_{facts.token}"


def message_object(facts: Facts, content: list[Json], usage: Json, ending: Json) -> Json:
    """A message."""
    return {
        "id": message_id(facts),
        "type": "message",
        "role": "assistant",
        "model": facts.model,
        "content": content,
        **ending,
        "usage": usage,
    }


_MAX_DIGITS = 4_000
"""Python reads no longer ones."""

NOT_ENDED: Json = {"stop_reason": None, "stop_sequence": None}


def ending(delivered: Delivered) -> Json:
    """Why the turn ended."""
    if delivered.finish_reason == "length":
        reason = "max_tokens"
    elif delivered.finish_reason == "tool_calls":
        reason = "tool_use"
    else:
        reason = "end_turn" if delivered.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": delivered.stop if reason == "stop_sequence" else None}


def content_of(delivered: Delivered, signature: str, *, hides_thinking: bool) -> list[Json]:
    """The blocks of a turn: thinking, text, calls. Calls that were cut are not among them."""
    message = delivered.message
    blocks: list[Json] = []
    if message.reasoning:
        thinking = "" if hides_thinking else message.reasoning
        blocks.append({"type": "thinking", "thinking": thinking, "signature": signature})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_object(call.arguments)})
    return blocks


def arguments_object(arguments: str) -> Json:
    """A call's arguments as an object. Numbers that no reader of JSON could hold stay text."""
    if not arguments.strip():
        return {}
    return json.loads(arguments, parse_float=_number, parse_int=_whole_number, parse_constant=str)


def _number(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text


def _whole_number(text: str) -> int | str:
    return int(text) if len(text) <= _MAX_DIGITS else text


def usage_object(facts: Facts, usage: Usage) -> Json:
    """Prompt tokens in three parts that add up: read from the cache, written at the client's marks, and the others.

    Written are the tokens computed now up to the last ``cache_control``, when the engine's cache was told of it.
    """
    read = min(usage.cached_tokens, usage.prompt_tokens)
    written = {ttl: 0 for ttl in TTL_S}
    names = {seconds: ttl for ttl, seconds in TTL_S.items()}
    done = read
    for mark in facts.marks:
        end = min(mark.position, usage.prompt_tokens)
        if end > done:
            written[names[mark.ttl_s]] += end - done
            done = end
    return {
        "input_tokens": usage.prompt_tokens - done,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": done - read,
        "cache_creation": {f"ephemeral_{ttl}_input_tokens": tokens for ttl, tokens in written.items()},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "service_tier": "standard",
    }


def notes_of(facts: Facts, usage: Usage, delivered: Delivered, places: Places) -> Json:
    """The extension object ``k3``; turns of the history by the client's own message numbers."""
    notes = {**completion_notes(facts, usage), **turn_notes(delivered)}
    replay: Json = notes["replay"]
    for entry in (*replay.get("turns", ()), replay.get("prefix", {})):
        if entry.get("index") is not None:
            entry["index"] = places.number(entry["index"])
    return notes
