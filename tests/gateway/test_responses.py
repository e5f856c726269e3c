"""The Responses API over HTTP: answers, streams, chains, and one session with chat completions."""

import json
from typing import Any

import pytest

from tests.gateway.bodies import MODEL, WEATHER_TOOL, chat_with_tool
from tests.gateway.conftest import Running
from tests.gateway.responses_client import CALL, EXACT, Client
from tests.gateway.responses_items import FLAT_TOOL, asks, events_of, message, output
from tests.gateway.stub_engine import StubEngine, cut
from tests.gateway.vocabulary import TurnWriter


@pytest.fixture
def client(gateway: Running, stub: StubEngine) -> Client:
    """A client of the served gateway."""
    return Client(gateway, stub)


async def test_a_response_has_its_items_in_order_and_says_what_was_used(client: Client, writer: TurnWriter) -> None:
    ids = writer.turn("hm", "I look.", (CALL, CALL))
    body = asks(tools=[FLAT_TOOL], instructions="Sys", metadata={"a": "b"}, max_output_tokens=500)
    response = await client.ask(body, ids)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, prose, call, _ = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}] and "encrypted_content" not in reasoning
    assert prose["content"][0]["text"] == "I look."
    assert call["arguments"] == '{"city": "Oslo", "days": 3.0}' and call["call_id"].startswith("call_")
    names = [item["id"].partition("_")[0] for item in response["output"]]
    assert names == ["rs", "msg", "fc", "fc"] and response["id"].startswith("resp_")
    assert response["status"] == "completed" and {item["status"] for item in response["output"]} == {"completed"}
    assert response["usage"] == {
        "input_tokens": len(client.prompt), "input_tokens_details": {"cached_tokens": 3}, "output_tokens": len(ids),
        "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": len(client.prompt) + len(ids),
    }  # fmt: skip
    assert (response["instructions"], response["metadata"], response["tools"]) == ("Sys", {"a": "b"}, [FLAT_TOOL])
    assert (response["temperature"], response["top_p"], response["store"]) == (1.0, 0.95, True)
    assert await client.get(response["id"]) == response


async def test_a_stream_has_the_events_of_the_api_in_order_and_ends_with_the_same_response(
    client: Client, writer: TurnWriter
) -> None:
    ids = writer.turn("h", "I", (CALL,))
    response = await client.ask(asks(tools=[FLAT_TOOL], stream=False), ids)
    answer = await client.http.post("/v1/responses", json=asks(tools=[FLAT_TOOL], stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    delta = "response.function_call_arguments.delta"
    order = [event["type"] for event in events if event["type"] != delta]
    text = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    item = ["output_item.added", *text, "output_item.done"]
    assert order == [
        f"response.{kind}"
        for kind in (
            "created", "in_progress",
            *(kind.format("reasoning_text") for kind in item),
            *(kind.format("output_text") for kind in item),
            "output_item.added", "function_call_arguments.done", "output_item.done",
            "completed",
        )
    ]  # fmt: skip
    assert [event.get("output_index") for event in events if "item" in event] == [0, 0, 1, 1, 2, 2]
    call = events[-1]["response"]["output"][2]
    assert "".join(event["delta"] for event in events if event["type"] == delta) == call["arguments"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["usage"] is None

    def plain(response: dict[str, Any]) -> str:
        """Without what no two responses have in common."""
        text = json.dumps({**response, "created_at": 0, "completed_at": 0, "k3": None})
        return text.replace(response["id"].removeprefix("resp_"), "T").replace(response["output"][2]["call_id"], "C")

    assert plain(events[-1]["response"]) == plain(response)
    assert await client.get(events[-1]["response"]["id"]) == events[-1]["response"]


async def test_a_turn_that_is_cut_is_incomplete_and_its_cut_call_is_not_among_the_items(
    client: Client, stub: StubEngine, writer: TurnWriter
) -> None:
    whole = writer.turn("h", "I look", (CALL,))
    stub.plan = lambda _: cut(whole[:-70])
    for stream in (False, True):
        answer = await client.http.post("/v1/responses", json=asks(tools=[FLAT_TOOL], stream=stream))
        response = events_of(answer.text)[-1]["response"] if stream else answer.json()
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
        assert response["k3"]["incomplete_tool_calls"][0]["name"] == "get_weather"
    events = events_of(answer.text)
    assert events[-1]["type"] == "response.incomplete"
    dones = [event["item"]["status"] for event in events if event["type"] == "response.output_item.done"]
    assert dones == ["completed", "completed", "incomplete"]
    stub.plan = lambda _: cut(writer.text("thinking and"))
    (item,) = (await client.post("", asks()))["output"]
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")


async def test_a_turn_without_text_has_an_empty_message(client: Client, writer: TurnWriter) -> None:
    response = await client.ask(asks(), writer.turn("h", ""))
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][1]["content"][0]["text"] == ""


async def test_each_step_extends_the_last_whether_sent_whole_or_by_its_id(client: Client, writer: TurnWriter) -> None:
    first = asks(tools=[FLAT_TOOL], instructions="Sys")
    ids = writer.turn("hm\n", "I look.", (CALL, CALL))
    response = await client.ask(first, ids)
    prompt = client.prompt
    outputs = [output(item["call_id"], "rain") for item in response["output"] if item["type"] == "function_call"]

    whole = [message("user", "Hello"), *response["output"], *outputs]
    await client.ask({**first, "input": whole}, writer.turn())
    by_items = client.prompt
    assert by_items[: len(prompt) + len(ids)] == prompt + ids
    assert client.headers["x-k3-replay"] == EXACT

    second = await client.ask(
        {**first, "input": outputs, "previous_response_id": response["id"]}, writer.turn("x", "y")
    )
    assert client.prompt == by_items and client.headers["x-k3-replay"] == EXACT
    third = await client.ask({**first, "input": "and?", "previous_response_id": second["id"]}, writer.turn())
    assert client.headers["x-k3-replay"].startswith("exact; exact=2")
    assert client.prompt[: len(by_items)] == by_items

    listed = await client.get(f"{third['id']}/input_items?order=asc&limit=100")
    assert [item["type"] for item in listed["data"]] == [
        "message", "reasoning", "message", "function_call", "function_call", "function_call_output",
        "function_call_output", "reasoning", "message", "message",
    ]  # fmt: skip
    assert listed["data"][0]["content"] == [{"type": "input_text", "text": "Hello"}]


async def test_two_responses_fork_from_one(client: Client, writer: TurnWriter) -> None:
    root = await client.ask(asks("one"), writer.turn("R", "root"))
    prompts: list[list[int]] = []
    for text in ("left", "right", "left"):
        await client.ask(asks(text, previous_response_id=root["id"]), writer.turn("S", text))
        prompts.append(client.prompt)
    assert prompts[0] == prompts[2] != prompts[1]


async def test_instructions_are_those_of_the_request_alone(client: Client, writer: TurnWriter) -> None:
    root = await client.ask(asks("one", instructions="Old."), writer.turn("R", "root"))
    await client.ask(asks("two", previous_response_id=root["id"]), writer.turn())
    text = bytes(token for token in client.prompt if token < 256).decode()
    assert "Old." not in text and "root" in text
    await client.ask(asks("two", previous_response_id=root["id"], instructions="New."), writer.turn())
    assert "New." in bytes(token for token in client.prompt if token < 256).decode()


@pytest.mark.parametrize("settings_key", ["store", "include"])
async def test_a_client_that_returns_encrypted_content_only_gets_its_thinking_back(
    client: Client, writer: TurnWriter, settings_key: str
) -> None:
    asked = {"store": False} if settings_key == "store" else {"include": ["reasoning.encrypted_content"]}
    ids = writer.turn("deep thought", "Hi")
    response = await client.ask(asks(**asked), ids)
    prompt = client.prompt
    reasoning, said = response["output"]
    assert reasoning["encrypted_content"].startswith("k3.")
    # Another head: only the signature can tell that this is the turn.
    returned = [message("user", "Other"), {**reasoning, "content": None, "id": None}, {**said, "id": None}]
    await client.ask(asks([*returned, message("user", "go on")], **asked), writer.turn())
    assert client.headers["x-k3-replay"] == EXACT
    start = len(prompt) - len("Hello") + len("Other")
    assert client.prompt[start : start + len(ids)] == ids


async def test_one_session_of_both_protocols_has_the_ids_of_either(
    client: Client, gateway: Running, writer: TurnWriter
) -> None:
    ids = writer.turn("R", "I look.", (CALL,))
    await client.ask(asks("Weather in Oslo?", tools=[FLAT_TOOL]), ids)
    by_responses = client.prompt
    answer = await gateway.ask(chat_with_tool())
    assert client.prompt == by_responses
    said = answer["choices"][0]["message"]
    (call,) = said["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    sent = {"model": MODEL, "tools": [WEATHER_TOOL]}
    question = {"role": "user", "content": "Weather in Oslo?"}
    await gateway.ask({**sent, "messages": [question, said, result]})
    by_chat = client.prompt
    assert by_chat[: len(by_responses) + len(ids)] == by_responses + ids
    items = [
        question,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        message("assistant", "I look."),
        {"type": "function_call", "call_id": call["id"], **call["function"]},
        output(call["id"], "rain"),
    ]
    await client.ask(asks(items, tools=[FLAT_TOOL]), writer.turn())
    assert client.prompt == by_chat and client.headers["x-k3-replay"] == EXACT
