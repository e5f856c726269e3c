"""A client that is still sending when its request is refused reads the refusal, and cannot hold the connection."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.gateway import http, lingering
from tests.gateway.conftest import Running
from tests.gateway.process import running, write

LARGE = 300_000
UPLOAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Bodies of a few bytes."""
    return {**settings, "max_body_bytes": 1_000}


@pytest.fixture
async def connection(gateway: Running) -> AsyncGenerator[Connection, None]:
    """A connection on which a test writes what it likes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    yield reader, writer
    writer.close()


async def sent_in_pieces(connection: Connection, raw: bytes, pieces: int = 20) -> bytes:
    """All of it sent, however soon the answer came, and then what was answered until the connection ended."""
    reader, writer = connection
    step = len(raw) // pieces + 1
    for at in range(0, len(raw), step):
        writer.write(raw[at : at + step])
        await writer.drain()
        await asyncio.sleep(0.005)
    return await reader.read()


def error_of(answer: bytes) -> tuple[bytes, str]:
    """Status line and the code of the error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    ("raw", "line", "code"),
    [
        (b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-long: " + b"v" * LARGE, b"HTTP/1.1 431 ", "headers_too_large"),
        (b"GET /" + b"p" * LARGE, b"HTTP/1.1 431 ", "headers_too_large"),
        (UPLOAD + b"content-length: %d\r\n\r\n" % LARGE + b" " * LARGE, b"HTTP/1.1 413 ", "request_too_large"),
        (
            UPLOAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % LARGE + b" " * LARGE,
            b"HTTP/1.1 413 ",
            "request_too_large",
        ),
        (UPLOAD + b"transfer-encoding: chunked\r\n\r\nno size\r\n" + b" " * LARGE, b"HTTP/1.1 400 ", "http_error"),
        (b"\x16\x03\x01" + b" " * LARGE, b"HTTP/1.1 400 ", "http_error"),
        (b"HELLO\r\n\r\n", b"HTTP/1.1 400 ", "http_error"),
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 ", "http_error"),
    ],
)
async def test_a_refusal_is_read_by_who_is_still_sending(
    connection: Connection, raw: bytes, line: bytes, code: str
) -> None:
    first, error = error_of(await sent_in_pieces(connection, raw))
    assert first.startswith(line)
    assert error == code


async def test_who_never_stops_sending_is_cut_off_after_a_while(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lingering, "LINGER_S", 0.2)
    reader, writer = connection
    writer.write(UPLOAD + b"content-length: %d\r\n\r\n" % LARGE)
    assert error_of(await reader.read())[1] == "request_too_large"
    with pytest.raises(ConnectionError):
        for _ in range(500):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)


async def test_only_so_much_is_thrown_away(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "LINGER_BYTES", 10_000)
    reader, writer = connection
    writer.write(UPLOAD + b"content-length: %d\r\n\r\n" % LARGE)
    assert error_of(await reader.read())[1] == "request_too_large"
    sent = 0
    with pytest.raises(ConnectionError):
        for _ in range(500):
            writer.write(b" " * 1_000)
            await writer.drain()
            await asyncio.sleep(0.01)
            sent += 1_000
    assert sent < 100_000


async def test_an_answer_that_ends_in_order_is_not_held(connection: Connection) -> None:
    reader, writer = connection
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    began = time.monotonic()
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.write(b"more")  # the other side is closed, not half of it
    await asyncio.sleep(0.05)
    with pytest.raises(ConnectionError):
        for _ in range(20):
            writer.write(b"more")
            await writer.drain()
            await asyncio.sleep(0.01)
    assert time.monotonic() - began < lingering.LINGER_S


async def test_a_server_that_stops_does_not_wait_for_one_that_sends(settings_file: Path) -> None:
    """The real server, which shows too that it is the one with this kind of connection."""
    async with running(write(settings_file.parent, {"max_body_bytes": 1_000})) as (process, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(UPLOAD + b"content-length: %d\r\n\r\n" % LARGE)
        assert error_of(await reader.read())[1] == "request_too_large"
        began = time.monotonic()
        process.terminate()
        assert await process.wait() == 0
        writer.close()
    assert time.monotonic() - began < lingering.LINGER_S


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
    monkeypatch.setattr(http, "CLIENT_IDLE_S", 0.5)
    reader, writer = connection
    body = json.dumps({"model": "x"}).encode()
    writer.write(UPLOAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
    for at in range(len(body)):
        writer.write(body[at : at + 1])
        await asyncio.sleep(0.06)
    assert error_of(await reader.read())[0].startswith(b"HTTP/1.1 404 ")
