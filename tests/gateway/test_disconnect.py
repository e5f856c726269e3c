"""Clients that leave, read slowly or come in crowds; driven through hand-written receive and send where it matters."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.types import Message

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.settings import GatewaySettings
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import chat, streamed
from tests.gateway.conftest import Running
from tests.gateway.stub_engine import Script, StubEngine, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258
HANG_S = 10.0


class Client:
    """An ASGI client: sends one request, then leaves when told; `on_body` may block like a full socket."""

    def __init__(self, body: dict[str, Any], key: str = "") -> None:
        self.headers = [(b"content-type", b"application/json"), (b"x-api-key", key.encode())]
        self.sent: list[Message] = []
        self.leave = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.got_body = asyncio.Event()
        self._requests = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive(self) -> Message:
        if self._requests:
            return self._requests.pop()
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.may_read.wait()
        self.sent.append(message)
        if message["type"] == "http.response.body":
            self.got_body.set()

    async def run(self, app: Starlette) -> None:
        """The whole exchange; it must not outlast the hang guard."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": self.headers,
        }
        with anyio.move_on_after(HANG_S) as guard:
            await app(scope, self.receive, self.send)
        assert not guard.cancelled_caught, f"the application did not return within {HANG_S:g} s"

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


@pytest.fixture
async def app(settings: dict[str, Any], tokenizer: K3Tokenizer, engine_url: str) -> AsyncGenerator[Starlette, None]:
    """The gateway's application without a server around it."""
    engine = SGLangEngine(engine_url)
    yield create_app(GatewaySettings(**settings), engine, tokenizer)
    await engine.aclose()


async def leaves_after(condition: Any, client: Client, app: Starlette) -> None:
    """Run the client and let it leave once the condition is there."""
    task = asyncio.create_task(client.run(app))
    await condition
    client.leave.set()
    await task


@pytest.mark.parametrize("body", [chat(), streamed(chat()), chat(n=3), chat(stop="never")], ids=str)
async def test_leaving_during_prefill_aborts_every_engine_request(
    app: Starlette, stub: StubEngine, body: dict[str, Any]
) -> None:
    stub.plan = lambda _: Script([], None)
    n = body.get("n", 1)
    client = Client(body)
    await leaves_after(stub.until(lambda engine: len(engine.running) == n), client, app)
    assert sorted(stub.aborts) == sorted(request["rid"] for request in stub.requests)
    await stub.until(lambda engine: not engine.running)
    assert client.sent == []


async def test_leaving_in_mid_stream_aborts_the_engine_request(
    app: Starlette, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda _: Script([writer.text("thinking")], None)
    client = Client(streamed(chat()))
    await leaves_after(client.got_body.wait(), client, app)
    assert stub.aborts == [stub.requests[0]["rid"]]
    assert b"reasoning_content" in client.body and b"[DONE]" not in client.body


async def test_leaving_while_a_send_is_blocked_aborts_the_engine_request(
    app: Starlette, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda _: Script([writer.text("thinking")], None)
    client = Client(streamed(chat()))
    client.may_read.clear()
    await leaves_after(stub.until(lambda engine: bool(engine.running)), client, app)
    assert stub.aborts == [stub.requests[0]["rid"]]


async def test_a_send_that_fails_ends_the_completion_quietly(
    app: Starlette, stub: StubEngine, writer: TurnWriter
) -> None:
    class Broken(Client):
        async def send(self, message: Message) -> None:
            raise OSError("connection reset")

    stub.plan = lambda _: Script([writer.text("thinking")], None)
    await Broken(streamed(chat())).run(app)
    assert stub.aborts == [stub.requests[0]["rid"]]


async def test_leaving_before_the_body_is_complete_starts_nothing(app: Starlette, stub: StubEngine) -> None:
    class Hasty(Client):
        async def receive(self) -> Message:
            return {"type": "http.disconnect"}

    await Hasty(chat()).run(app)
    assert stub.requests == []


async def test_an_engine_that_does_not_take_the_abort_cannot_hold_the_client_up(
    app: Starlette, stub: StubEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agent_runtime.engine.sglang.ABORT_TIMEOUT_S", 0.05)
    asked = asyncio.Event()

    async def deaf(self: SGLangEngine, rid: str) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(SGLangEngine, "abort", deaf)
    stub.plan = lambda _: Script([], None)
    await leaves_after(stub.until(lambda engine: bool(engine.running)), Client(chat()), app)
    assert asked.is_set()
    assert "no answer from the engine" in caplog.text


async def test_a_slow_reader_does_not_hold_up_another_stream(
    app: Starlette, stub: StubEngine, writer: TurnWriter
) -> None:
    long = writer.turn("T" * 3000, "Hi")
    stub.plan = lambda _: says(long, end_of_msg=END_OF_MSG, piece=3)
    slow, fast = Client(streamed(chat())), Client(streamed(chat()))
    slow.may_read.clear()
    slow_task = asyncio.create_task(slow.run(app))
    await stub.until(lambda engine: len(engine.requests) == 1)
    await fast.run(app)
    assert b"[DONE]" in fast.body
    assert not slow_task.done() and slow.sent == []
    slow.may_read.set()
    await slow_task
    assert slow.body.count(b"reasoning_content") == fast.body.count(b"reasoning_content") == 1000


async def test_32_streams_at_once_do_not_mix(
    gateway: Running, stub: StubEngine, writer: TurnWriter, tokenizer: K3Tokenizer
) -> None:
    def plan(body: dict[str, Any]) -> Script:
        prompt = tokenizer.decode([token for token in body["input_ids"] if token < 256])
        nonce = prompt[prompt.index("nonce-") :][:9]
        return says(writer.turn(f"I saw {nonce}", f"{nonce} " * 20), end_of_msg=END_OF_MSG, piece=5)

    stub.plan = plan
    answers: dict[int, str] = {}

    async def talk(number: int) -> None:
        body = streamed(chat(f"nonce-{number:03d}"))
        response = await gateway.client.post("/v1/chat/completions", json=body)
        answers[number] = response.text

    async with anyio.create_task_group() as tasks:
        for number in range(32):
            tasks.start_soon(talk, number)
    assert stub.running == {} and stub.aborts == []
    for number, text in answers.items():
        chunks = [json.loads(block[6:]) for block in text.split("\n\n") if block.startswith("data: {")]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        content = "".join(delta.get("content", "") for delta in deltas)
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert content == f"nonce-{number:03d} " * 20
        assert reasoning == f"I saw nonce-{number:03d}"
