"""Failures of another server, and clients that leave: what the client is told, and that nothing goes on for nobody."""

import asyncio
import json
from typing import Any

import pytest

from tests.agent.scripted_endpoint import Reply, call, says, usage
from tests.gateway.bodies import chat, chat_with_tool, streamed
from tests.upstream.conftest import ask, before, scripted

ENVELOPE = {"error": {"message": "their words", "type": "x", "param": "messages", "code": "their_code"}}
FLAT = {"object": "error", "message": "their words", "type": "BadRequest", "code": 400}
OVERFLOW = {"error": {"message": "This model's maximum context length is 9 tokens."}}

STATUSES: list[tuple[int, Any, int, str]] = [
    (400, ENVELOPE, 400, "upstream_rejected"),
    (400, FLAT, 400, "upstream_rejected"),
    (400, OVERFLOW, 400, "context_length_exceeded"),
    (422, {"detail": [{"msg": "their words"}]}, 400, "upstream_rejected"),
    (401, ENVELOPE, 502, "upstream_unauthorized"),
    (403, ENVELOPE, 502, "upstream_unauthorized"),
    (404, ENVELOPE, 502, "upstream_failed"),
    (429, ENVELOPE, 429, "upstream_rate_limited"),
    (500, ENVELOPE, 502, "upstream_failed"),
    (503, ENVELOPE, 503, "upstream_unavailable"),
    (504, ENVELOPE, 504, "upstream_timeout"),
]


@pytest.mark.parametrize("body", [chat(), streamed(chat())], ids=["whole", "streamed"])
@pytest.mark.parametrize(("status", "said", "told", "code"), STATUSES)
async def test_a_status_becomes_what_the_client_can_act_on(
    status: int, said: Any, told: int, code: str, body: dict[str, Any]
) -> None:
    async with scripted(Reply(status=status, body=said, headers={"retry-after": "7"})) as (_, client):
        answer = await ask(client, body, told)
    assert answer["error"]["code"] == code
    assert str(status) in answer["error"]["message"]
    assert ("retry-after" in answer["headers"]) == (status in (429, 500, 503, 404)), "the server's own, where it helps"


async def test_nobody_there_is_a_503_and_silence_a_504() -> None:
    async with before("http://127.0.0.1:9/v1") as client:
        answer = await ask(client, chat(), 503)
        assert answer["error"]["code"] == "upstream_unavailable" and "127.0.0.1:9" in answer["error"]["message"]
        assert (await client.get("/health")).status_code == 503
    async with scripted(Reply(finish=None, end="hang"), engine_idle_timeout_s=0.2) as (_, client):
        assert (await ask(client, chat(), 504))["error"]["code"] == "upstream_timeout"


@pytest.mark.parametrize("end", ["close", "done"])
async def test_a_stream_that_breaks_off_is_an_error_and_no_turn(end: Any) -> None:
    broken = Reply([{"reasoning_content": "thi"}, {"content": "half"}], None, end=end)
    async with scripted(broken, says("Whole.")) as (_, client):
        assert (await ask(client, chat(), 502))["error"]["code"] == "upstream_stream_broken"
        assert (await client.get("/v1/k3/replay")).json()["known_turns"] == 0
    async with scripted(broken) as (_, client):
        response = await client.post("/v1/chat/completions", json=streamed(chat()))
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["code"] == "upstream_stream_broken"


async def test_what_breaks_after_the_finish_reason_has_lost_nothing() -> None:
    async with scripted(Reply([{"content": "Hi"}], "stop", end="close")) as (_, client):
        answer = await ask(client, chat())
    assert answer["choices"][0]["message"]["content"] == "Hi"
    assert answer["choices"][0]["k3"]["warnings"] == ["usage_missing"]


@pytest.mark.parametrize(
    "raw",
    ['data: {"error": {"message": "cuda"}}\n\n', "data: nonsense\n\n", "data: []\n\n", 'data: {"choices": 1}\n\n'],
)
async def test_nonsense_in_a_stream_is_a_502(raw: str) -> None:
    async with scripted(Reply(raw=raw)) as (_, client):
        assert (await ask(client, chat(), 502))["error"]["code"] == "upstream_failed"


@pytest.mark.parametrize("body", [chat(), streamed(chat())], ids=["whole", "streamed"])
async def test_a_client_that_leaves_closes_the_stream_of_the_server(body: dict[str, Any]) -> None:
    async with scripted(Reply([{"reasoning_content": "on and on"}], None, end="hang")) as (endpoint, client):
        task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        while not endpoint.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        assert await asyncio.to_thread(endpoint.disconnected.wait, 10)


async def test_a_stop_string_ends_the_stream_of_the_server_and_is_not_shown() -> None:
    endless = Reply([{"reasoning_content": "END"}, {"content": "One EN"}, {"content": "D two"}], None, end="hang")
    async with scripted(endless) as (endpoint, client):
        answer = await ask(client, chat(stop="END"))
        assert await asyncio.to_thread(endpoint.disconnected.wait, 10)
    assert answer["choices"][0]["message"]["content"] == "One "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "stop" not in endpoint.requests[0]


FAULTS: list[tuple[list[Any], str, dict[str, Any], list[str]]] = [
    ([{"content": "<thi"}, {"content": "nk>a</th"}, {"content": "ink>\n\nb"}], "stop",
     {"reasoning_content": "a", "content": "b"}, ["thinking_in_content"]),
    ([{"reasoning": "a", "reasoning_content": "a"}, {"content": "b"}], "stop",
     {"reasoning_content": "a", "content": "b"}, []),
    ([{"reasoning_content": "a"}, {"content": ""}], "stop", {"content": ""}, ["empty_answer"]),
    ([{"reasoning_content": "x<|open|>tools<|sep|>"}, {"content": "b"}], "stop", {"content": "b"}, ["markers_in_text"]),
    ([{"content": "\ud83d"}, {"content": "\ude00 \ud83d"}], "stop", {"content": "\U0001f600 \ufffd"}, []),
    ([{"content": "b"}], "content_filter", {"content": "b"}, ["content_filter"]),
]  # fmt: skip


@pytest.mark.parametrize(("deltas", "finish", "message", "warnings"), FAULTS)
async def test_known_faults_of_answers_are_put_right_or_told(
    deltas: list[Any], finish: str, message: dict[str, Any], warnings: list[str]
) -> None:
    async with scripted(Reply(deltas, finish, usage(1, 1))) as (_, client):
        choice = (await ask(client, chat()))["choices"][0]
    assert message.items() <= choice["message"].items()
    assert choice.get("k3", {}).get("warnings", []) == warnings


async def test_calls_are_put_right_where_servers_are_known_to_err() -> None:
    null = Reply([call("get_weather", "null"), call("get_weather", '{"city": "B"}', index=1)], "stop", usage(1, 1))
    async with scripted(null) as (_, client):
        choice = (await ask(client, chat_with_tool()))["choices"][0]
        assert choice["finish_reason"] == "tool_calls", "although the server says stop"
        assert [made["function"]["arguments"] for made in choice["message"]["tool_calls"]] == ["{}", '{"city": "B"}']
        dropped = (await ask(client, chat_with_tool(tool_choice="none")))["choices"][0]
    assert "tool_calls" not in dropped["message"] and "calls_not_allowed" in dropped["k3"]["warnings"]
