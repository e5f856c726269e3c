"""What a client may ask at once and in one request; the place of every request is free again however it ends."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest

from agent_runtime.gateway.keys import ApiKeys
from tests.gateway.bodies import MODEL, WEATHER_TOOL, chat, streamed, user
from tests.gateway.conftest import Running
from tests.gateway.responses_items import asks
from tests.gateway.stub_engine import Script, StubEngine, says
from tests.gateway.test_disconnect import Client
from tests.gateway.vocabulary import TurnWriter

ANN, BOB = "ann-key-0123456789", "bob-key-0123456789"
END_OF_MSG = 258
Json = dict[str, Any]

MESSAGE = {"model": MODEL, "max_tokens": 50, "messages": [user("Hello")]}
SAID = {"role": "assistant", "content": "y"}
RAW = {"model": MODEL, "prompt": "Hello"}
ROUTES: list[tuple[str, Json]] = [
    ("/v1/chat/completions", chat()),
    ("/v1/chat/completions", streamed(chat())),
    ("/v1/messages", MESSAGE),
    ("/v1/messages", {**MESSAGE, "stream": True}),
    ("/v1/responses", asks()),
    ("/v1/responses", asks(stream=True)),
    ("/v1/responses", asks(background=True)),
    ("/v1/completions", RAW),
]


@pytest.fixture
def keys() -> ApiKeys:
    """Two owners."""
    return ApiKeys({ANN: "ann", BOB: "bob"})


@pytest.fixture
def settings(settings: Json) -> Json:
    """Two completions at once, one of each owner, and nobody waits; a test changes that."""
    return {**settings, "max_running": 2, "max_running_per_key": 1, "max_waiting": 0}


@pytest.fixture
async def ann(gateway: Running) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client with a key."""
    async with httpx.AsyncClient(
        base_url=gateway.url, trust_env=False, timeout=30, headers={"x-api-key": ANN}
    ) as client:
        yield client


async def generating(client: httpx.AsyncClient, key: str = ANN) -> tuple[int, int]:
    """Running and waiting, as their owner is shown them."""
    state = (await client.get("/v1/k3/limits", headers={"x-api-key": key})).json()["generating"]
    return state["running"], state["waiting"]


async def until_free(client: httpx.AsyncClient) -> None:
    """Wait until nothing of the owner runs or waits; bounded by the test's own timeout."""
    while await generating(client) != (0, 0):
        await asyncio.sleep(0.01)


def endless(body: Json) -> Script:
    """An engine that never comes to an end."""
    return Script([], None)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_what_is_too_much_is_a_429_in_the_protocols_words_and_leaving_makes_room(
    gateway: Running, ann: httpx.AsyncClient, stub: StubEngine, path: str, body: Json
) -> None:
    stub.plan = endless
    task = asyncio.ensure_future(ann.post("/v1/chat/completions", json=chat()))
    await stub.until(lambda engine: len(engine.running) == 1)
    refused = await ann.post(path, json=body)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    error = refused.json()["error"]
    assert error["type"] == "rate_limit_error"
    if path == "/v1/messages":
        assert refused.json()["type"] == "error" and refused.json()["k3"]["code"] == "rate_limit_exceeded"
    else:
        assert error["code"] == "rate_limit_exceeded"
    assert await generating(gateway.client) == (1, 0)
    assert await generating(gateway.client, BOB) == (0, 0)
    task.cancel()
    await until_free(ann)
    stub.plan = lambda _: says([104, 105, END_OF_MSG], end_of_msg=END_OF_MSG)
    assert (await ann.post(path, json=body)).status_code == 200


async def test_another_owner_has_a_place_of_its_own(gateway: Running, ann: httpx.AsyncClient, stub: StubEngine) -> None:
    stub.plan = endless
    task = asyncio.ensure_future(ann.post("/v1/chat/completions", json=chat()))
    await stub.until(lambda engine: len(engine.running) == 1)
    other = asyncio.ensure_future(gateway.client.post("/v1/chat/completions", json=chat(), headers={"x-api-key": BOB}))
    await stub.until(lambda engine: len(engine.running) == 2)
    for leaving in (task, other):
        leaving.cancel()
    await stub.until(lambda engine: not engine.running)


def _unreachable(stub: StubEngine) -> None:
    stub.plan = lambda _: Script([ConnectionError("gone")], None)


def _aborts(stub: StubEngine) -> None:
    stub.plan = lambda _: Script([], {"type": "abort", "message": "no memory"})


def _refuses(stub: StubEngine) -> None:
    stub.plan = lambda _: Script([], None, status=400, error={"error": {"message": "too long for the pool"}})


def _nonsense(stub: StubEngine) -> None:
    stub.plan = lambda _: Script([[10**9]], {"type": "stop"})


@pytest.mark.parametrize("fails", [_unreachable, _aborts, _refuses, _nonsense])
@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_request_that_fails_leaves_its_place(
    ann: httpx.AsyncClient, stub: StubEngine, path: str, body: Json, fails: Callable[[StubEngine], None]
) -> None:
    fails(stub)
    await ann.post(path, json=body)
    await until_free(ann)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b"\xff", b""])
async def test_a_request_that_is_refused_leaves_its_place(ann: httpx.AsyncClient, path: str, content: bytes) -> None:
    for _ in range(3):
        assert (await ann.post(path, content=content)).status_code in (400, 404)
    assert await generating(ann) == (0, 0)


@pytest.mark.parametrize(("path", "body"), [route for route in ROUTES if route[1].get("stream")])
async def test_a_stream_left_in_its_middle_leaves_its_place(
    ann: httpx.AsyncClient, stub: StubEngine, writer: TurnWriter, path: str, body: Json
) -> None:
    stub.plan = lambda _: Script([writer.text("thinking")], None)
    async with ann.stream("POST", path, json=body) as response:
        async for _ in response.aiter_lines():
            break
        assert await generating(ann) == (1, 0)
    await until_free(ann)
    assert len(stub.aborts) == 1


async def test_a_response_in_the_background_holds_its_place_until_it_is_cancelled(
    ann: httpx.AsyncClient, stub: StubEngine
) -> None:
    stub.plan = endless
    made = (await ann.post("/v1/responses", json=asks(background=True))).json()
    await stub.until(lambda engine: len(engine.running) == 1)
    assert await generating(ann) == (1, 0)
    assert (await ann.post("/v1/responses", json=asks())).status_code == 429
    assert (await ann.post(f"/v1/responses/{made['id']}/cancel")).status_code == 200
    await until_free(ann)


@pytest.mark.parametrize("settings_of_queue", [{"max_waiting": 2}])
async def test_who_waits_is_served_in_turn_and_may_leave(
    gateway: Running, ann: httpx.AsyncClient, stub: StubEngine, settings_of_queue: Json
) -> None:
    stub.plan = endless
    tasks = [asyncio.ensure_future(ann.post("/v1/chat/completions", json=streamed(chat(str(n))))) for n in range(1)]
    await stub.until(lambda engine: len(engine.running) == 1)
    for number in (1, 2):
        tasks.append(asyncio.ensure_future(ann.post("/v1/chat/completions", json=streamed(chat(str(number))))))
        while await generating(ann) != (1, number):
            await asyncio.sleep(0.01)
    assert (await ann.post("/v1/chat/completions", json=chat())).status_code == 429
    tasks[1].cancel()
    while await generating(ann) != (1, 1):
        await asyncio.sleep(0.01)
    tasks[0].cancel()
    await stub.until(lambda engine: len(engine.requests) == 2 and len(engine.running) == 1)
    assert b"2" in bytes(token for token in stub.requests[1]["input_ids"] if token < 256)
    tasks[2].cancel()
    await until_free(ann)


@pytest.fixture
def settings_of_queue() -> Json:
    """What a test of the queue changes."""
    return {}


@pytest.fixture(autouse=True)
def _queue(request: pytest.FixtureRequest, settings: Json) -> None:
    settings.update(request.getfixturevalue("settings_of_queue"))


@pytest.mark.parametrize("settings_of_queue", [{"max_waiting": 5, "max_wait_s": 0.05}])
async def test_who_waits_too_long_is_told(ann: httpx.AsyncClient, stub: StubEngine, settings_of_queue: Json) -> None:
    stub.plan = endless
    task = asyncio.ensure_future(ann.post("/v1/chat/completions", json=chat()))
    await stub.until(lambda engine: len(engine.running) == 1)
    response = await ann.post("/v1/chat/completions", json=chat())
    assert response.status_code == 429 and "none ended within 0.05 s" in response.json()["error"]["message"]
    task.cancel()
    await until_free(ann)


async def test_counting_has_places_of_its_own(ann: httpx.AsyncClient, stub: StubEngine) -> None:
    stub.plan = endless
    task = asyncio.ensure_future(ann.post("/v1/chat/completions", json=chat()))
    await stub.until(lambda engine: len(engine.running) == 1)
    counted = await ann.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": [user("Hello")]})
    assert counted.status_code == 200
    assert (await ann.post("/v1/tokenize", json=RAW)).status_code == 200
    task.cancel()
    await until_free(ann)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {**chat(), "messages": [user("x")] * 20}, "messages"),
        ("/v1/chat/completions", chat(tools=[WEATHER_TOOL] * 20), "tools"),
        ("/v1/tokenize", {**chat(), "messages": [user("x")] * 20}, "messages"),
        ("/v1/k3/cache/pin", {"seconds": 1, "messages": [user("x")] * 20}, "messages"),
        ("/v1/responses", asks([user("x")] * 20), "input"),
        ("/v1/messages", {**MESSAGE, "messages": [user("x"), SAID] * 10 + [user("x")]}, "messages"),
    ],
)
@pytest.mark.parametrize("settings_of_queue", [{"max_messages": 10, "max_tools": 10}])
async def test_too_many_messages_or_tools_are_refused(
    ann: httpx.AsyncClient, stub: StubEngine, path: str, body: Json, param: str, settings_of_queue: Json
) -> None:
    response = await ann.post(path, json=body)
    answer = response.json()
    error = answer["error"] | answer.get("k3", {})
    assert (response.status_code, error["param"]) == (400, param), response.text
    assert (
        error["code"] == f"too_many_{'tools' if param == 'tools' else 'messages'}" and "at most 10" in error["message"]
    )
    assert stub.requests == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/tokenize"])
@pytest.mark.parametrize("depth", [129, 900, 100_000])
async def test_a_body_nested_too_deeply_is_refused(ann: httpx.AsyncClient, path: str, depth: int) -> None:
    for nested in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        response = await ann.post(path, content=f'{{"model": "{MODEL}", "tools": {nested}}}'.encode())
        assert response.status_code == 400
        assert "nested too deeply" in response.json()["error"]["message"]


async def test_as_many_levels_as_may_be_are_no_fault(ann: httpx.AsyncClient) -> None:
    schema: Json = {"type": "object"}
    for _ in range(50):
        schema = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "deep", "parameters": schema}}
    assert (await ann.post("/v1/chat/completions", json=chat(tools=[tool]))).status_code == 200


async def test_too_many_headers_are_a_431(ann: httpx.AsyncClient) -> None:
    many = {f"x-header-{number}": "v" for number in range(120)}
    response = await ann.get("/v1/models", headers=many)
    assert (response.status_code, response.json()["error"]["code"]) == (431, "headers_too_large")
    assert "at most 100 may be" in response.json()["error"]["message"]
    assert (await ann.get("/v1/models", headers={"x-long": "v" * 33_000})).status_code == 431
    assert (await ann.get(f"/v1/models?{'q' * 33_000}")).status_code == 431
    assert (await ann.get("/v1/models", headers={"x-long": "v" * 20_000})).status_code == 200


async def test_a_failure_nobody_foresaw_leaves_its_place(
    ann: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks(*asked: Any) -> Any:
        raise RuntimeError("a fault of the gateway")

    monkeypatch.setattr("agent_runtime.gateway.app.prepare", breaks)
    for _ in range(3):
        assert (await ann.post("/v1/chat/completions", json=chat())).status_code == 500
    assert await generating(ann) == (0, 0)
    assert "a fault of the gateway" in caplog.text


async def test_a_task_that_the_server_cancels_leaves_its_place(
    gateway: Running, ann: httpx.AsyncClient, stub: StubEngine
) -> None:
    stub.plan = endless
    client = Client(chat(), ANN)
    task = asyncio.ensure_future(client.run(gateway.app))
    await stub.until(lambda engine: len(engine.running) == 1)
    assert await generating(ann) == (1, 0)
    task.cancel()
    await asyncio.wait([task])
    assert await generating(ann) == (0, 0)
    await stub.until(lambda engine: not engine.running)
