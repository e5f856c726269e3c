"""One session driven in turn by chat completions, responses and messages: the ids are those of any one of them."""

import json
from typing import Any

import pytest

from tests.gateway.bodies import MODEL, WEATHER_TOOL
from tests.gateway.conftest import Running
from tests.gateway.responses_items import FLAT_TOOL, items_of
from tests.gateway.stub_engine import StubEngine, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258
Json = dict[str, Any]
# Written as no renderer would: "3.0" is the model's own spelling.
CALL = ("get_weather", (("city", "string", "Oslo"), ("days", "number", "3.0")))
FUNCTION = WEATHER_TOOL["function"]
NEUTRAL_TOOL = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}


def chat_request(history: list[Json]) -> Json:
    return {"model": MODEL, "messages": history, "tools": [WEATHER_TOOL]}


def responses_request(history: list[Json]) -> Json:
    return {"model": MODEL, "input": items_of(history), "tools": [FLAT_TOOL]}


def messages_request(history: list[Json]) -> Json:
    sent: list[Json] = []
    for message in history:
        blocks = [{"type": "text", "text": message["content"]}] if message.get("content") else []
        if message["role"] == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}]
        if message.get("reasoning_content"):
            blocks.insert(0, {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        for call in message.get("tool_calls", []):
            function = call["function"]
            arguments = json.loads(function["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        sent.append({"role": "assistant" if message["role"] == "assistant" else "user", "content": blocks})
    return {"model": MODEL, "max_tokens": 1000, "messages": sent, "tools": [NEUTRAL_TOOL]}


def chat_turn(answer: Json) -> Json:
    return answer["choices"][0]["message"]


def responses_turn(answer: Json) -> Json:
    turn: Json = {"role": "assistant", "content": None}
    for item in answer["output"]:
        if item["type"] == "reasoning":
            turn["reasoning_content"] = item["content"][0]["text"]
        elif item["type"] == "message":
            turn["content"] = item["content"][0]["text"]
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    return turn


def messages_turn(answer: Json) -> Json:
    turn: Json = {"role": "assistant", "content": None}
    for block in answer["content"]:
        if block["type"] == "thinking":
            turn["reasoning_content"] = block["thinking"]
        elif block["type"] == "text":
            turn["content"] = block["text"]
        else:
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            turn.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
    return turn


PROTOCOLS = {
    "chat": ("/v1/chat/completions", chat_request, chat_turn),
    "responses": ("/v1/responses", responses_request, responses_turn),
    "messages": ("/v1/messages", messages_request, messages_turn),
}


@pytest.mark.parametrize("first", range(3))
async def test_a_session_driven_in_turn_by_three_protocols(
    gateway: Running, stub: StubEngine, writer: TurnWriter, first: int
) -> None:
    order = [list(PROTOCOLS)[(first + turn) % 3] for turn in range(6)]
    history: list[Json] = [{"role": "user", "content": "Weather in Oslo?"}]
    expected: list[int] = []
    for number, name in enumerate(order):
        ids = writer.turn(f"thought {number}", f"I look {number}.", (CALL,) if number % 2 == 0 else ())
        stub.plan = lambda _, ids=ids: says(ids, end_of_msg=END_OF_MSG)
        prompts: list[list[int]] = []
        for other in (*(other for other in PROTOCOLS if other != name), name):
            path, request, turn_of = PROTOCOLS[other]
            answer = await gateway.client.post(path, json=request(history))
            assert answer.status_code == 200, answer.text
            prompts.append(stub.requests[-1]["input_ids"])
        assert prompts[0] == prompts[1] == prompts[2]
        assert prompts[0][: len(expected)] == expected
        expected = prompts[0] + ids
        said = turn_of(answer.json())
        history += [
            said,
            *({"role": "tool", "tool_call_id": c["id"], "content": "rain"} for c in said.get("tool_calls", [])),
        ]
        if not said.get("tool_calls"):
            history.append({"role": "user", "content": f"and {number}?"})
        assert "missing=0; foreign=0" in answer.headers["x-k3-replay"]
