"""The Messages and the Responses API before another server: blocks in order, turns found again, words of the client."""

from pathlib import Path
from typing import Any

import pytest

from agent_runtime.ledger.__main__ import main
from agent_runtime.ledger.reading import LedgerReader
from tests.agent.scripted_endpoint import Reply, says, usage
from tests.gateway.bodies import chat, chat_with_tool, user
from tests.gateway.messages import WEATHER, assembled, continued, parsed
from tests.gateway.messages import ask as asked
from tests.gateway.responses_items import FLAT_TOOL, asks, events_of
from tests.upstream.conftest import ask, scripted

NAME = "get_weather"


def piece(index: int, arguments: str | None, name: str | None = None) -> dict[str, Any]:
    """A piece of a call; the first one has its name."""
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": f"c{index}", "function": function}]}


OSLO, ROME = {"city": "Oslo"}, {"city": "Rome"}
SHAPES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "two calls in turns": (
        [piece(0, '{"city":', NAME), piece(1, '{"city":', NAME), piece(0, '"Oslo"}'), piece(1, '"Rome"}')],
        [OSLO, ROME],
    ),
    "all names first": (
        [piece(0, "", NAME), piece(1, "", NAME), piece(0, '{"city":"Oslo"}'), piece(1, '{"city":"Rome"}')],
        [OSLO, ROME],
    ),
    "text in a call": ([piece(0, '{"city":', NAME), {"content": "\n"}, piece(0, '"Oslo"}')], [OSLO]),
    "thinking in a call": ([piece(0, '{"city":', NAME), {"reasoning_content": "hm"}, piece(0, '"Oslo"}')], [OSLO]),
    "arguments null": ([piece(0, "null", NAME), piece(1, None, NAME)], [{}, {}]),
    "a call that never ends": ([piece(0, '{"city', NAME), piece(1, '{"city":"Rome"}', NAME)], [ROME]),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_calls_are_told_one_after_the_other_however_their_pieces_come(shape: str) -> None:
    deltas, inputs = SHAPES[shape]
    async with scripted(Reply(deltas, "tool_calls", usage(9, 9))) as (_, client):
        body = asked(tools=[WEATHER], stream=True)
        response = await client.post("/v1/messages", json=body)
        if shape == "a call that never ends":  # its beginning has been streamed, and never becomes JSON
            stream = parsed(response.text)
            starts = [event["content_block"] for event in stream if event["type"] == "content_block_start"]
            assert [block["type"] for block in starts] == ["tool_use", "tool_use"]
        else:
            content = assembled(parsed(response.text))["content"]
            assert [block["input"] for block in content if block["type"] == "tool_use"] == inputs
        last = events_of((await client.post("/v1/responses", json=asks(tools=[FLAT_TOOL], stream=True))).text)[-1]
        calls = [item for item in last["response"]["output"] if item["type"] == "function_call"]
        whole = (await ask(client, chat_with_tool()))["choices"][0]["message"]["tool_calls"]
        assert [item["arguments"] for item in calls] == [call["function"]["arguments"] for call in whole]


async def test_arguments_that_go_on_after_their_end_are_an_error_of_the_server() -> None:
    deltas = [piece(0, "{}", NAME), piece(1, '{"city":', NAME), piece(0, '{"city":"Oslo"}')]
    async with scripted(Reply(deltas, "tool_calls")) as (_, client):
        error = (await ask(client, chat_with_tool(), 502))["error"]
    assert error["code"] == "upstream_failed" and "after they were complete" in error["message"]


async def test_a_stop_string_is_named_and_a_call_that_it_cut_is_none() -> None:
    deltas = [piece(0, '{"city":', NAME), {"content": "so STOP"}, piece(0, '"Oslo"}')]
    async with scripted(Reply(deltas, "tool_calls")) as (_, client):
        response = await client.post("/v1/messages", json=asked(tools=[WEATHER], stop_sequences=["STOP"]))
        assert (response.json()["stop_reason"], response.json()["stop_sequence"]) == ("stop_sequence", "STOP")
        body = asks(tools=[FLAT_TOOL], stop="STOP", stream=True)
        last = events_of((await client.post("/v1/responses", json=body)).text)[-1]
        assert [item["type"] for item in last["response"]["output"]] == ["message"]


async def test_a_call_before_a_stop_string_is_a_call_streamed_or_not() -> None:
    deltas = [piece(0, '{"city":"Oslo"}', NAME), {"content": "so STOP"}]
    async with scripted(Reply(deltas, "tool_calls")) as (_, client):
        choice = (await ask(client, chat_with_tool(stop="STOP")))["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and len(choice["message"]["tool_calls"]) == 1
        body = asks(tools=[FLAT_TOOL], stop="STOP", stream=True)
        last = events_of((await client.post("/v1/responses", json=body)).text)[-1]
        assert [item["type"] for item in last["response"]["output"]] == ["function_call", "message"]


async def test_a_session_of_the_messages_api_is_found_shown_and_sent_again_from_its_ledger(
    ledger: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    script = (says("one", "thinking of one"), says("two", "thinking of two"), says("three", "thinking of three"))
    async with scripted(*script, ledger=ledger) as (endpoint, client):
        first = asked()
        answer = (await client.post("/v1/messages", json=first)).json()
        answer["content"][0]["thinking"] = ""  # its signature alone comes back
        second = continued(first, answer, user("more"))
        answer = (await client.post("/v1/messages", json=second)).json()
        assert answer["k3"]["replay"]["verdict"] == "exact"
        assert endpoint.requests[1]["messages"][1]["reasoning_content"] == "thinking of one"
        third = continued({**second, "system": "Another head."}, answer, user("more"))
        answer = (await client.post("/v1/messages", json=third)).json()
        assert answer["k3"]["replay"]["prefix"]["lost_bytes"] > 0
    with LedgerReader(ledger) as reader:
        (session,) = reader.sessions()
    assert main(["show", str(ledger), str(session.id)]) == 0
    assert b"bytes lost" in capsysbinary.readouterr().out
    assert main(["replay", str(ledger)]) == 0
    sent = capsysbinary.readouterr().out.splitlines()
    assert len(sent) == 3 and b"thinking of one" in sent[1] and b"Another head." in sent[2]


async def test_a_prompt_that_is_too_long_for_the_server_is_told_in_the_clients_words() -> None:
    body = {"error": {"message": "maximum context length is 10 tokens", "code": "context_length_exceeded"}}
    async with scripted(Reply(status=400, body=body)) as (_, client):
        response = await client.post("/v1/messages", json=asked())
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("prompt is too long: ")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", asks(reasoning={"effort": "none"}), "reasoning.effort"),
        ("/v1/messages", asked(thinking={"type": "disabled"}), "thinking"),
        (
            "/v1/messages",
            asked(tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
            "tool_choice.disable_parallel_tool_use",
        ),
    ],
)
async def test_what_the_server_does_not_honour_is_refused_by_the_clients_name_for_it(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with scripted(says("Hi"), profile="moonshot") as (endpoint, client):
        response = await client.post(path, json=body)
        assert response.status_code == 400
        told = response.json()
        assert (told.get("k3") or told["error"])["param"] == param
        assert told["error"]["message"].startswith(param)
        assert not endpoint.requests


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", asked()),
        ("/v1/tokenize", {"prompt": "x"}),
        ("/v1/tokenize", chat()),
        ("/v1/detokenize", {"tokens": [1]}),
        ("/v1/completions", {"model": "kimi-k3", "prompt": "x"}),
    ],
)
async def test_without_a_vocabulary_nothing_is_counted(path: str, body: dict[str, Any]) -> None:
    async with scripted(says("Hi")) as (_, client):
        response = await client.post(path, json=body)
    assert response.status_code == 501 and "no_vocabulary" in response.text
