"""Bodies and items of the Responses API, and the same conversation as chat messages."""

import json
from typing import Any

from tests.gateway.bodies import MODEL, WEATHER_TOOL

FLAT_TOOL: dict[str, Any] = {"type": "function", **WEATHER_TOOL["function"]}


def asks(given: Any = "Hello", **fields: Any) -> dict[str, Any]:
    """A request."""
    return {"model": MODEL, "input": given, **fields}


def message(role: str, text: str) -> dict[str, Any]:
    """A message item in its short form."""
    return {"role": role, "content": text}


def output(call_id: str, text: str) -> dict[str, Any]:
    """The result of a call."""
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def items_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages as a client of the Responses API has them."""
    items: list[dict[str, Any]] = []
    for sent in messages:
        if sent["role"] == "tool":
            items.append(output(sent["tool_call_id"], sent["content"]))
            continue
        if sent["role"] != "assistant":
            items.append(message(sent["role"], sent["content"]))
            continue
        if sent.get("reasoning_content"):
            thought = [{"type": "reasoning_text", "text": sent["reasoning_content"]}]
            items.append({"type": "reasoning", "summary": [], "content": thought})
        calls = sent.get("tool_calls", [])
        if sent.get("content") or not calls:
            text = {"type": "output_text", "text": sent.get("content") or "", "annotations": []}
            items.append({"type": "message", "role": "assistant", "content": [text], "status": "completed"})
        items += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
    return items


def events_of(text: str) -> list[dict[str, Any]]:
    """Events of a stream, each checked to be named and numbered as it should be."""
    events: list[dict[str, Any]] = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        name, data = lines
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        events.append(event)
    return events
