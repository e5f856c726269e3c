"""Streams: the order and the keys of their events, and that they say the same as one object."""

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.bodies import chat, chat_with_tool, streamed
from tests.gateway.conftest import Running
from tests.gateway.stub_engine import Script, StubEngine, cut, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG, OPEN = 258, 259
OSLO = (("city", "string", "Oslo"), ("days", "number", "3"))


async def events(gateway: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The decoded events of a stream that must end with [DONE]."""
    response = await gateway.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def assembled(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of choice 0 add up to."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("reasoning_content", "content"):
                if key in delta:
                    message[key] = message.get(key, "") + delta[key]
            for piece in delta.get("tool_calls", ()):
                call = calls.setdefault(piece["index"], {"name": "", "arguments": ""})
                for key, value in piece["function"].items():
                    call[key] += value
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


async def test_a_stream_says_role_then_reasoning_then_content_then_the_end(gateway: Running) -> None:
    chunks = await events(gateway, streamed(chat()))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "T"},
        {"content": "H"},
        {"content": "i"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]]
    assert reasons == [None, None, None, None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_no_delta_holds_a_null(gateway: Running, stub: StubEngine, writer: TurnWriter) -> None:
    stub.plan = lambda body: says(writer.turn("T", "x", (("get_weather", OSLO),)), end_of_msg=END_OF_MSG, piece=3)
    chunks = await events(gateway, streamed(chat_with_tool()))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "null" not in json.dumps(deltas)


async def test_a_call_begins_with_its_name_and_goes_on_with_arguments_only(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    calls = (("get_weather", OSLO), ("get_weather", OSLO))
    stub.plan = lambda body: says(writer.turn("T", "", calls), end_of_msg=END_OF_MSG)
    chunks = await events(gateway, streamed(chat_with_tool()))
    pieces = [
        piece for chunk in chunks for choice in chunk["choices"] for piece in choice["delta"].get("tool_calls", ())
    ]
    for index in (0, 1):
        first, *later = [piece for piece in pieces if piece["index"] == index]
        assert set(first) == {"index", "id", "type", "function"}
        assert first["function"] == {"name": "get_weather", "arguments": ""}
        assert len(later) > 4 and all(set(piece) == {"index", "function"} for piece in later)
        assert all(set(piece["function"]) == {"arguments"} for piece in later)
        text = "".join(piece["function"]["arguments"] for piece in later)
        assert json.loads(text) == {"city": "Oslo", "days": 3}
    assert chunks[-2]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "tool_calls"}


async def test_usage_comes_last_and_only_when_asked(gateway: Running) -> None:
    asked = await events(gateway, streamed(chat()))
    assert asked[-1]["choices"] == [] and asked[-1]["usage"]["completion_tokens"] > 0
    assert not any("usage" in chunk for chunk in asked[:-1])
    silent = await events(gateway, streamed(chat(), usage=False))
    assert not any("usage" in chunk for chunk in silent)
    whole = await gateway.ask(chat())
    assert whole["usage"] == asked[-1]["usage"]


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
@pytest.mark.parametrize("incremental", [False, True])
async def test_streamed_and_whole_answers_agree_however_the_engine_cuts(
    gateway: Running, stub: StubEngine, writer: TurnWriter, piece: int, incremental: bool
) -> None:
    stub.incremental = incremental
    ids = writer.turn("Überlegt 🙂", "Ja: 你好\u2028!", (("get_weather", OSLO),))
    stub.plan = lambda body: says(ids, end_of_msg=END_OF_MSG, piece=piece)
    whole = (await gateway.ask(chat_with_tool()))["choices"][0]["message"]
    parts = assembled(await events(gateway, streamed(chat_with_tool())))
    whole["tool_calls"] = [call["function"] for call in whole["tool_calls"]]
    assert parts == whole
    assert parts["content"] == "Ja: 你好\u2028!"


async def test_a_cut_call_never_adds_up_to_valid_arguments(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    whole = writer.turn("", "", (("get_weather", OSLO),))
    first_argument = whole.index(OPEN, whole.index(ord("w")))
    for length in range(first_argument - 12, len(whole) - 20, 5):
        stub.plan = lambda body, length=length: cut(whole[:length], piece=5)
        chunks = await events(gateway, streamed(chat_with_tool()))
        end = chunks[-2]["choices"][0]
        if "k3" not in end:
            continue
        assert end["finish_reason"] == "length"
        assert [call["name"] for call in end["k3"]["incomplete_tool_calls"]] == ["get_weather"]
        (call,) = assembled(chunks)["tool_calls"]
        with pytest.raises(ValueError):
            json.loads(call["arguments"])


async def test_text_reaches_the_client_before_the_engine_has_ended(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    go_on = asyncio.Event()
    ids = writer.turn("T", "Hi")
    stub.plan = lambda body: Script([ids[:1], go_on.wait, ids[1:]], {"type": "stop", "matched": END_OF_MSG})
    seen: list[str] = []
    async with gateway.client.stream("POST", "/v1/chat/completions", json=streamed(chat())) as response:
        async for line in response.aiter_lines():
            seen.append(line)
            if "reasoning_content" in line:
                go_on.set()
    assert go_on.is_set() and "data: [DONE]" in seen


class TestSilence:
    """With comments after a twentieth of a second."""

    @pytest.fixture
    def settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {**settings, "keep_alive_s": 0.05}

    async def test_a_silent_engine_is_covered_by_comments(
        self, gateway: Running, stub: StubEngine, writer: TurnWriter
    ) -> None:
        go_on = asyncio.Event()
        stub.plan = lambda body: Script([go_on.wait, writer.turn("T", "Hi")], {"type": "stop", "matched": END_OF_MSG})
        lines: list[str] = []
        async with gateway.client.stream("POST", "/v1/chat/completions", json=streamed(chat())) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(": keep-alive") == 2:
                    go_on.set()
        assert lines.count(": keep-alive") >= 2
        assert "data: [DONE]" in lines

    async def test_a_refusal_after_the_silence_arrives_as_an_event(self, gateway: Running, stub: StubEngine) -> None:
        go_on = asyncio.Event()
        stub.plan = lambda body: Script([go_on.wait, ConnectionError("engine died")], None)
        lines: list[str] = []
        async with gateway.client.stream("POST", "/v1/chat/completions", json=streamed(chat())) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines.append(line)
                if line == ": keep-alive":
                    go_on.set()
        error, done = [line for line in lines if line.startswith("data: ")]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        assert done == "data: [DONE]"
