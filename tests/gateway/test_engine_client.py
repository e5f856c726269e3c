"""The token-exact engine client: ids arrive once each and in order, failures are typed, closing aborts."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.engine.output_ids import OutputIds, server_sent_data
from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.engine.types import Finish
from agent_runtime.errors import (
    EngineAborted,
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
)
from tests.gateway.stub_engine import Script, StubEngine, cut, says

PROMPT = [1, 2, 3]
SAMPLING = {"max_new_tokens": 8}


@pytest.fixture
async def engine(engine_url: str) -> AsyncGenerator[SGLangEngine, None]:
    """A client of the scripted engine."""
    client = SGLangEngine(engine_url)
    yield client
    await client.aclose()


def event(ids: Sequence[int], completion_tokens: int, finish: Any = None) -> dict[str, Any]:
    """One event of /generate."""
    meta = {"completion_tokens": completion_tokens, "finish_reason": finish, "prompt_tokens": 3}
    return {"output_ids": list(ids), "meta_info": meta}


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, 3), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    incremental=st.booleans(),
)
def test_every_id_arrives_once_whether_events_hold_totals_or_increments(
    ids: list[int], cuts: list[int], incremental: bool
) -> None:
    bounds = sorted({0, len(ids), *(at for at in cuts if at <= len(ids))})
    follower = OutputIds("r", 3)
    got: list[int] = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        got += follower.chunk(event(ids[begin if incremental else 0 : end], end)).ids
    last = follower.chunk(event([] if incremental else ids, len(ids), {"type": "length"}))
    assert got + list(last.ids) == ids
    assert last.finish == Finish("length")
    assert last.completion_tokens == len(ids)


def test_a_total_may_already_hold_ids_that_its_count_does_not() -> None:
    follower = OutputIds("r", 3)
    assert follower.chunk(event([5, 6, 7], 2)).ids == (5, 6, 7)
    assert follower.chunk(event([5, 6, 7], 3)).ids == ()
    assert follower.chunk(event([5, 6, 7, 8], 4)).ids == (8,)


def test_an_abort_that_repeats_the_last_id_of_an_incremental_stream_adds_nothing() -> None:
    follower = OutputIds("r", 3)
    follower.chunk(event([5, 6], 2))
    assert follower.chunk(event([6], 2)).ids == ()


@pytest.mark.parametrize(
    "second",
    [
        event([9, 9, 9], 3),
        event([5], 7),
        event([5, 6], 2, {"type": "magic"}),
        {"text": "no ids"},
        {"output_ids": [5, 6], "meta_info": {}},
        {"output_ids": [5, 6, "7"], "meta_info": {"completion_tokens": 3}},
        event([5, 6, -1], 3),
        {"output_ids": [5, 6, 7], "meta_info": {"completion_tokens": 3, "cached_tokens": "many"}},
    ],
    ids=[
        *("other beginning", "numbers do not add up", "unknown finish", "no ids", "no count"),
        *("text as id", "negative id", "text as count"),
    ],
)
def test_events_that_make_no_sense_are_protocol_errors(second: dict[str, Any]) -> None:
    follower = OutputIds("r", 3)
    follower.chunk(event([5, 6], 2))
    with pytest.raises(EngineProtocolError):
        follower.chunk(second)


@settings(deadline=None)
@given(st.lists(st.text(), max_size=5), st.lists(st.integers(1, 9), min_size=1, max_size=20))
async def test_events_survive_any_network_pieces_and_any_characters(texts: list[str], sizes: list[int]) -> None:
    raw = b": comment\n\n" + b"".join(
        b"data: " + json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\r\n\r\n"
        for text in texts
    )

    async def network() -> AsyncGenerator[bytes, None]:
        at = 0
        for turn in range(len(raw)):
            size = sizes[turn % len(sizes)]
            yield raw[at : at + size]
            at += size

    payloads = [payload async for payload in server_sent_data(network())]
    assert [json.loads(payload.decode("utf-8", "surrogatepass")) for payload in payloads] == texts


@pytest.mark.parametrize("incremental", [False, True])
async def test_generate_returns_the_ids_the_engine_made(
    engine: SGLangEngine, stub: StubEngine, incremental: bool
) -> None:
    stub.incremental = incremental
    stub.plan = lambda body: says([7, 7, 8, 7], end_of_msg=8, cached_tokens=2)
    generation = await engine.generate(PROMPT, SAMPLING, "r1")
    assert generation.ids == (7, 7, 8, 7)
    assert (generation.prompt_tokens, generation.cached_tokens) == (3, 2)
    assert generation.finish == Finish("stop", 8)
    (request,) = stub.requests
    assert request["input_ids"] == PROMPT and request["rid"] == "r1" and request["stream"] is True
    assert request["sampling_params"]["max_new_tokens"] == 8
    assert stub.aborts == []


async def test_a_finished_stream_leaves_its_connection_for_the_next(engine: SGLangEngine, stub: StubEngine) -> None:
    stub.plan = lambda body: cut([1])
    for turn in range(3):
        await engine.generate(PROMPT, SAMPLING, f"r{turn}")
    assert len(stub.client_ports) == 1


async def test_closing_a_stream_early_aborts_the_request(engine: SGLangEngine, stub: StubEngine) -> None:
    stub.plan = lambda body: Script([[7], [8]], None)
    async with aclosing(engine.stream(PROMPT, SAMPLING, "r1")) as chunks:
        assert (await anext(chunks)).ids[:1] == (7,)
    assert stub.aborts == ["r1"]
    await stub.until(lambda state: not state.running)


async def test_cancelling_generate_aborts_the_request(engine: SGLangEngine, stub: StubEngine) -> None:
    stub.plan = lambda body: Script([[7]], None)
    task = asyncio.create_task(engine.generate(PROMPT, SAMPLING, "r1"))
    await stub.until(lambda state: "r1" in state.running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stub.aborts == ["r1"]


@pytest.mark.parametrize(
    ("script", "error", "aborted"),
    [
        (Script([], None, status=400, error={"error": {"message": "bad"}}), EngineRejected, False),
        (Script([], None, status=500, error={"message": "bad"}), EngineUnavailable, False),
        (Script([], None, error={"message": "bad", "code": 400}), EngineRejected, True),
        (Script([[1], ConnectionError()], None), EngineUnavailable, True),
        (Script([[1]], {"type": "abort", "message": "bad"}), EngineAborted, True),
        (Script([[1]], {"type": "abort", "message": "bad", "status_code": 503}), EngineUnavailable, True),
        (Script([[1]], {"type": "abort", "message": "bad", "status_code": 400}), EngineRejected, True),
    ],
)
async def test_failures_are_typed_and_name_the_request(
    engine: SGLangEngine, stub: StubEngine, script: Script, error: type[Exception], aborted: bool
) -> None:
    stub.plan = lambda body: script
    with pytest.raises(error) as caught:
        await engine.generate(PROMPT, SAMPLING, "r1")
    assert caught.value.rid == "r1"  # pyright: ignore[reportAttributeAccessIssue]
    assert stub.aborts == (["r1"] if aborted else [])


async def test_a_silent_engine_is_a_timeout_and_the_request_is_aborted(engine_url: str, stub: StubEngine) -> None:
    stub.plan = lambda body: Script([], None)
    engine = SGLangEngine(engine_url, idle_timeout_s=0.1)
    with pytest.raises(EngineTimeout, match=r"sent nothing for 0\.1 s"):
        await engine.generate(PROMPT, SAMPLING, "r1")
    assert stub.aborts == ["r1"]
    await engine.aclose()


async def test_no_engine_at_all_is_unavailable_and_unhealthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    engine = SGLangEngine(url)
    with pytest.raises(EngineUnavailable, match="no engine answers"):
        await engine.generate(PROMPT, SAMPLING, "r1")
    with pytest.raises(EngineUnavailable):
        await engine.abort("r1")
    with pytest.raises(EngineUnavailable):
        await engine.server_info()
    assert not await engine.healthy()
    await engine.aclose()


class Unreliable:
    """An engine that closes the connection on so many generations before it answers one."""

    def __init__(self, breaks: int) -> None:
        self.breaks = breaks
        self.seen: list[tuple[str, str]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length"))
        path, rid = head.split()[1], json.loads(await reader.readexactly(size))["rid"]
        self.seen.append((path, rid))
        if path == "/abort_request":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        elif self.breaks:
            self.breaks -= 1
        else:
            end = json.dumps(event([7], 1, {"type": "length"})).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: " + end + b"\n\n")
        writer.close()


@pytest.mark.parametrize("breaks", [1, 2])
async def test_a_connection_that_breaks_before_an_answer_is_tried_once_more_under_another_rid(breaks: int) -> None:
    unreliable = Unreliable(breaks)
    async with await asyncio.start_server(unreliable.serve, "127.0.0.1", 0) as server:
        engine = SGLangEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        if breaks == 1:
            assert (await engine.generate(PROMPT, SAMPLING, "abcdef")).ids == (7,)
        else:
            with pytest.raises(EngineUnavailable, match="connection to the engine broke"):
                await engine.generate(PROMPT, SAMPLING, "abcdef")
        await engine.aclose()
    generated = [rid for path, rid in unreliable.seen if path == "/generate"]
    assert len(generated) == 2 and generated[0] == "abcdef" and generated[1] != "abcdef" and len(generated[1]) == 6
    assert unreliable.seen[1] == ("/abort_request", "abcdef")
    assert breaks == 1 or ("/abort_request", generated[1]) in unreliable.seen


async def test_health_and_server_info_come_from_the_engine(engine: SGLangEngine, stub: StubEngine) -> None:
    assert await engine.healthy() and await engine.healthy(deep=True)
    assert await engine.server_info() == {"version": "stub"}
    stub.ready = False
    assert not await engine.healthy()
