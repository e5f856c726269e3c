"""Schemas a grammar cannot express: the answer says which, and what of a whole turn breaks them."""

import json
from typing import Any

from tests.gateway.bodies import chat, streamed
from tests.gateway.conftest import Running
from tests.gateway.stub_engine import StubEngine, cut, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258
ZIP = {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}, "required": ["zip"]}
TOOL = {"type": "function", "function": {"name": "look", "strict": True, "parameters": ZIP}}


def looks(writer: TurnWriter, value: str) -> list[int]:
    return writer.turn("", "", (("look", (("zip", "string", value),)),))


async def test_a_value_that_breaks_a_loosened_keyword_is_delivered_and_named(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    for value, problems in (("12345", None), ("1234x", ['zip: "1234x" does not match the pattern ^[0-9]{5}$'])):
        stub.plan = lambda body, value=value: says(looks(writer, value), end_of_msg=END_OF_MSG)
        answer = await gateway.ask(chat(tools=[TOOL]))
        assert answer["k3"]["loosened"] == ["look: pattern"]
        choice = answer["choices"][0]
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"zip": value}
        found = choice.get("k3", {}).get("schema_problems")
        assert found == (problems and [f"tool_calls[0].function.arguments: {what}" for what in problems])


async def test_a_stream_tells_the_same_with_its_last_event(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda body: says(looks(writer, "x"), end_of_msg=END_OF_MSG)
    response = await gateway.client.post("/v1/chat/completions", json=streamed(chat(tools=[TOOL])))
    events: list[dict[str, Any]] = [
        json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")
    ]
    (end,) = [event for event in events if event["choices"] and event["choices"][0]["finish_reason"]]
    assert end["k3"]["loosened"] == ["look: pattern"]
    assert end["choices"][0]["k3"]["schema_problems"][0].startswith("tool_calls[0].function.arguments: zip:")


async def test_a_cut_turn_and_a_request_without_contract_are_not_judged(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda body: cut(looks(writer, "x")[:-4])
    answer = await gateway.ask(chat(tools=[TOOL]))
    assert "schema_problems" not in answer["choices"][0].get("k3", {})
    free = {"type": "function", "function": {"name": "look", "parameters": ZIP}}
    stub.plan = lambda body: says(looks(writer, "x"), end_of_msg=END_OF_MSG)
    answer = await gateway.ask(chat(tools=[free]))
    assert "loosened" not in answer["k3"]
    assert "schema_problems" not in answer["choices"][0].get("k3", {})
