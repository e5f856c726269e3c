"""A client that is still sending when its request is refused reads the refusal, and cannot hold the connection."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.gateway import lingering
from tests.gateway.process import running, write
from tests.gateway.raw_http import LARGE, UPLOAD, Connection, error_of, sent_in_pieces


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Bodies of a few bytes."""
    return {**settings, "max_body_bytes": 1_000}


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
    connection: Connection, monkeypatch: pytest.MonkeyPatch, raw: bytes, line: bytes, code: str
) -> None:
    monkeypatch.setattr(lingering, "LINGER_S", 60.0)
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


async def test_an_answer_that_ends_in_order_is_not_held(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lingering, "LINGER_S", 60.0)
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


async def test_the_real_server_has_this_kind_of_connection(settings_file: Path) -> None:
    """On uvloop too, where that is installed: a refusal is read, and half a request does not keep it from stopping."""
    settings = {"max_body_bytes": 1_000, "shutdown_grace_s": 120}
    async with running(write(settings_file.parent, settings)) as (process, url):
        port = int(url.rpartition(":")[2])
        refused, half = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        raw = UPLOAD + b"content-length: %d\r\n\r\n" % LARGE + b" " * LARGE
        assert error_of(await sent_in_pieces(refused, raw))[1] == "request_too_large"
        half[1].write(b"GET /v1/models HTTP/1.1\r\n")
        await half[1].drain()
        process.terminate()
        async with asyncio.timeout(60):
            assert await process.wait() == 0
        assert await half[0].read() == b""
        for _, writer in (refused, half):
            writer.close()
