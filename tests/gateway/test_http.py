"""Connections of the gateway: how long a request may take to come, and that no end of one breaks anything else."""

import asyncio
import json
import logging
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from agent_runtime.gateway import http, lingering
from agent_runtime.gateway.http import Http
from tests.gateway.conftest import Running
from tests.gateway.raw_http import LARGE, UPLOAD, Connection, error_of
from tests.gateway.serving import serving

POST = b"POST / HTTP/1.1\r\nhost: x\r\n"


@asynccontextmanager
async def connected(app: ASGIApp) -> AsyncGenerator[Connection, None]:
    """A connection to an application of the test's own."""
    async with serving(app, Http) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        yield reader, writer
        writer.close()


async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers 404 at once, whatever else comes."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n",
        b"GET /v1/mod",
        UPLOAD + b"content-length: 10\r\n\r\n{",
        UPLOAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
)
async def test_a_request_that_does_not_come_to_its_end_is_given_up(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, raw: bytes
) -> None:
    monkeypatch.setattr(http, "CLIENT_IDLE_S", 0.2)
    reader, writer = connection
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
    writer.write(raw)
    line, error = error_of(await reader.read())
    assert line.startswith(b"HTTP/1.1 408 ")
    assert error == "request_timeout"


async def test_a_connection_that_says_nothing_is_closed_without_a_word(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "CLIENT_IDLE_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    assert await reader.read() == b""
    writer.close()


async def test_a_body_may_take_its_time_as_long_as_it_comes(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "CLIENT_IDLE_S", 3.0)
    reader, writer = connection
    body = json.dumps({"model": "x"}).encode()
    writer.write(UPLOAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
    for at in range(len(body)):
        writer.write(body[at : at + 1])
        await asyncio.sleep(0.3)
    assert error_of(await reader.read())[0].startswith(b"HTTP/1.1 404 ")


async def test_an_answer_may_take_longer_than_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CLIENT_IDLE_S", 0.05)

    async def streams(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
            for _ in range(5):
                await asyncio.sleep(0.1)
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await send({"type": "http.response.body"})

    for behind in (b"", b"GET / HT"):
        async with connected(streams) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + behind)
            assert (await reader.readuntil(b"xxxxx")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("rest", [b"1", b"1234", b"12345"], ids=["a byte more", "nearly all", "all of it"])
async def test_what_follows_an_early_answer_is_bounded_too(monkeypatch: pytest.MonkeyPatch, rest: bytes) -> None:
    """The first byte ends uvicorn's timer."""
    monkeypatch.setattr(http, "CLIENT_IDLE_S", 0.2)
    async with connected(refuses) as (reader, writer):
        writer.write(POST + b"content-length: 5\r\n\r\n")
        assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 404 ")
        writer.write(rest)
        async with asyncio.timeout(4):  # uvicorn would take five seconds
            assert await reader.read() == b""


@pytest.mark.parametrize(
    ("raw", "bad"),
    [
        (POST + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n", b"no size\r\n"),
        (POST + b"connection: close\r\ncontent-length: 1\r\n\r\nx", b"\r\n"),
    ],
    ids=["a chunk without size", "more than was said"],
)
async def test_the_application_hears_that_its_request_was_refused(
    raw: bytes, bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Any] = []

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            while (message := await receive())["type"] != "http.disconnect":
                heard.append(message)
            heard.append(message["type"])
            await refuses(scope, receive, send)

    with caplog.at_level(logging.ERROR):
        async with connected(waits) as (reader, writer):
            writer.write(raw)
            await asyncio.sleep(0.1)
            writer.write(bad)
            assert error_of(await reader.read())[1] == "http_error"
            await asyncio.sleep(0.1)
            assert heard[-1] == "http.disconnect"
    assert not caplog.records


async def test_a_client_that_resets_its_connection_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The answer to HEAD is one write, after which the reset is there and the loop has not seen it."""
    with caplog.at_level(logging.ERROR):
        async with serving(refuses, Http) as url:
            for half in (b"", b"HEAD / HT"):
                plain = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
                await asyncio.sleep(0.1)
                plain.sendall(half or b"HEAD / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 5\r\n\r\n1")
                await asyncio.sleep(0.1 if half else 0)
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                plain.close()
                if not half:
                    await asyncio.sleep(0.2)
    assert not caplog.records


async def test_a_server_that_stops_waits_for_no_half_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "LINGER_S", 60.0)
    writers: list[asyncio.StreamWriter] = []
    async with serving(refuses, Http) as url:
        for raw in (b"GET /x", POST + b"content-length: 50000\r\n\r\n1", b"no http" + b" " * LARGE):
            writers.append((await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2])))[1])
            writers[-1].write(raw)
        await asyncio.sleep(0.2)
    for writer in writers:
        with pytest.raises(ConnectionError):
            for _ in range(300):
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()
