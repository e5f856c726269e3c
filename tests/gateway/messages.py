"""Requests of Anthropic's Messages API, and the events of its streams."""

import json
from typing import Any

from tests.gateway.bodies import MODEL
from tests.gateway.conftest import Running

Json = dict[str, Any]

WEATHER: Json = {
    "name": "get_weather",
    "description": "The weather of one city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
MARK: Json = {"type": "ephemeral"}
IMAGE: Json = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def ask(text: Any = "Hello", **fields: Any) -> Json:
    """A request with one user message."""
    return {"model": MODEL, "max_tokens": 500, "messages": [{"role": "user", "content": text}], **fields}


def text(value: str, **fields: Any) -> Json:
    """A text block."""
    return {"type": "text", "text": value, **fields}


def result(call_id: str, content: Any, **fields: Any) -> Json:
    """A user message with the result of a call."""
    block = {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}
    return {"role": "user", "content": [block]}


def calls_and(*following: Json) -> list[Json]:
    """A conversation with a call, then what follows it."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": [call]}, *following]


def with_call(*following: Json, **fields: Any) -> Json:
    """A request of such a conversation."""
    return {**ask(tools=[WEATHER], **fields), "messages": calls_and(*following)}


def continued(body: Json, answer: Json, *following: Json) -> Json:
    """The next request of a session: the answer sent back as it came, then new messages."""
    turn = {"role": "assistant", "content": answer["content"]}
    return {**body, "messages": [*body["messages"], turn, *following]}


async def post(gateway: Running, body: Json, status: int = 200, path: str = "/v1/messages") -> Json:
    """The JSON of an answer, which must have `status`."""
    response = await gateway.client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


async def events(gateway: Running, body: Json) -> list[Json]:
    """The events of a stream, each named as its type says."""
    response = await gateway.client.post("/v1/messages?beta=true", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return parsed(response.text)


def parsed(stream: str) -> list[Json]:
    """Events of the text of a stream."""
    found: list[Json] = []
    for block in stream.split("\n\n")[:-1]:
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found


def assembled(stream: list[Json]) -> Json:
    """The message that a stream adds up to, as clients put it together; blocks must open and close in order."""
    assert [event["type"] for event in (stream[0], stream[-2], stream[-1])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    message = stream[0]["message"]
    is_open = False
    for event in stream[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                is_open = True
                message["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                _apply(message["content"][-1], event["delta"])
            case "content_block_stop":
                assert is_open and event["index"] == len(message["content"]) - 1
                is_open = False
                written = message["content"][-1].pop("json")
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(written or "{}")
            case kind:
                assert kind == "ping"
    assert not is_open
    last = stream[-2]
    more = {key: value for key, value in last.items() if key not in ("type", "delta", "usage")}
    return {**message, **last["delta"], "usage": last["usage"], **more}


def _apply(block: Json, delta: Json) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] += delta["signature"]
        case kind:
            assert kind == "input_json_delta"
            block["json"] += delta["partial_json"]
