"""A gateway told to stop: not ready at once, no new work, and what runs may end; a process each time."""

import json
import signal
import time
from pathlib import Path

import anyio
import httpx
import pytest

from tests.gateway.bodies import MODEL, chat, streamed
from tests.gateway.process import running, write
from tests.gateway.stub_engine import Script, StubEngine
from tests.gateway.vocabulary import TurnWriter

GRACE_S = 30


async def test_a_stop_refuses_new_work_and_lets_running_requests_end(
    settings_file: Path, engine_url: str, stub: StubEngine, writer: TurnWriter
) -> None:
    go_on = anyio.Event()
    rest = [*writer.turn("T", "Hi"), 258]
    stub.plan = lambda body: Script([rest[:1], go_on.wait, rest[1:]], {"type": "stop", "matched": 258})
    path = write(settings_file.parent, {"engine_url": engine_url, "shutdown_grace_s": GRACE_S})
    async with running(path) as (process, url), httpx.AsyncClient(base_url=url, trust_env=False) as client:
        assert (await client.get("/ready")).status_code == 200
        async with client.stream("POST", "/v1/chat/completions", json=streamed(chat())) as response:
            lines = response.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            while (ready := await client.get("/ready")).status_code == 200:
                await anyio.sleep(0.01)
            assert ready.status_code == 503 and ready.json() == {"status": "draining"}
            refused = await client.post("/v1/chat/completions", json=chat())
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "draining"
            message = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
            refused = await client.post("/v1/messages", json=message)
            assert refused.status_code == 529 and refused.json()["k3"]["code"] == "draining"
            assert (await client.get("/v1/models")).status_code == 200
            assert "k3_gateway_draining 1.0" in (await client.get("/metrics")).text
            go_on.set()
            assert [line async for line in lines][-2] == "data: [DONE]"
        assert await process.wait() == 0
    assert stub.aborts == [] and len(stub.requests) == 1


async def test_who_waits_for_a_place_is_turned_away_and_does_not_begin(
    settings_file: Path, engine_url: str, stub: StubEngine, writer: TurnWriter
) -> None:
    go_on = anyio.Event()
    stub.plan = lambda body: Script([go_on.wait, [*writer.turn("T", "Hi"), 258]], {"type": "stop", "matched": 258})
    settings = {"engine_url": engine_url, "shutdown_grace_s": GRACE_S, "max_running": 1}
    answers: list[httpx.Response] = []
    async with (
        running(write(settings_file.parent, settings)) as (process, url),
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
        anyio.create_task_group() as tasks,
    ):

        async def ask() -> None:
            answers.append(await client.post("/v1/chat/completions", json=chat()))

        async def until(running: int, waiting: int) -> None:
            while True:
                state = (await client.get("/v1/k3/limits")).json()["generating"]
                if (state["running"], state["waiting"]) == (running, waiting):
                    return
                await anyio.sleep(0.01)

        for waiting in (0, 1):
            tasks.start_soon(ask)
            await until(1, waiting)
        process.send_signal(signal.SIGTERM)
        await until(1, 0)
        go_on.set()
        assert await process.wait() == 0
    assert [answer.status_code for answer in answers] == [503, 200]
    assert answers[0].json()["error"]["code"] == "draining"
    assert len(stub.requests) == 1


async def test_a_response_in_the_background_may_end_too(
    settings_file: Path, engine_url: str, stub: StubEngine, writer: TurnWriter
) -> None:
    go_on = anyio.Event()
    turn = [*writer.turn("T", "Hi"), 258]
    stub.plan = lambda body: Script([go_on.wait, turn], {"type": "stop", "matched": 258})
    path = write(settings_file.parent, {"engine_url": engine_url, "shutdown_grace_s": GRACE_S})
    async with running(path) as (process, url), httpx.AsyncClient(base_url=url, trust_env=False) as client:
        body = {"model": MODEL, "input": "Hi", "background": True}
        made = (await client.post("/v1/responses", json=body)).json()
        await stub.until(lambda engine: len(engine.running) == 1)
        process.send_signal(signal.SIGTERM)
        while (await client.get("/ready")).json()["status"] != "draining":
            await anyio.sleep(0.01)
        go_on.set()
        assert await process.wait() == 0
    assert stub.aborts == [], made


async def test_a_second_signal_aborts_at_once(
    settings_file: Path, engine_url: str, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda body: Script([writer.text("thinking")], None)
    path = write(settings_file.parent, {"engine_url": engine_url, "shutdown_grace_s": GRACE_S})
    async with running(path) as (process, url), httpx.AsyncClient(base_url=url, trust_env=False) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream("POST", "/v1/chat/completions", json=streamed(chat())) as response:
                async for line in response.aiter_lines():
                    if "reasoning_content" in line:
                        process.send_signal(signal.SIGTERM)
                        while (await client.get("/ready")).status_code == 200:
                            await anyio.sleep(0.01)
                        process.send_signal(signal.SIGTERM)
        with anyio.fail_after(GRACE_S / 2):
            assert await process.wait() == 0
    assert stub.aborts == [stub.requests[0]["rid"]]


async def test_an_idle_gateway_stays_for_its_notice(settings_file: Path) -> None:
    path = write(settings_file.parent, {"shutdown_grace_s": GRACE_S, "drain_notice_s": 1.0})
    async with running(path) as (process, url), httpx.AsyncClient(base_url=url, trust_env=False) as client:
        process.send_signal(signal.SIGTERM)
        began_s = time.monotonic()
        while (await client.get("/ready")).json()["status"] != "draining":
            await anyio.sleep(0.01)
        assert await process.wait() == 0
        assert 0.9 <= time.monotonic() - began_s < GRACE_S / 2


async def test_log_lines_are_json_objects_with_counts_and_no_content(
    settings_file: Path, engine_url: str, stub: StubEngine
) -> None:
    path = write(settings_file.parent, {"engine_url": engine_url, "log_format": "json"})
    async with running(path) as (process, url), httpx.AsyncClient(base_url=url, trust_env=False) as client:
        await client.post("/v1/chat/completions", json=chat("a secret word"), headers={"x-k3-session": "s1"})
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        lines = [json.loads(line) async for line in process.stderr]
        assert await process.wait() == 0
    (line,) = (line for line in lines if "prompt_tokens" in line)
    assert line["session"] == "session:s1" and line["outcome"] == "done" and line["status"] is None
    assert line["prompt_tokens"] > 0 and line["output_tokens"] > 0 and line["total_ms"] >= line["first_ms"] > 0
    assert {"time", "level", "logger", "message", "id", "replay", "cached_tokens"} <= line.keys()
    assert "secret" not in json.dumps(lines)
