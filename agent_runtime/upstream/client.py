"""Speaks to another server's chat completions: one streamed request, its events as JSON objects."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from agent_runtime.upstream.errors import (
    UpstreamError,
    broken,
    from_event,
    not_understood,
    refused,
    silent,
    unreachable,
)

JSONObject = dict[str, Any]

MAX_ERROR_BYTES = 64 * 1024
MAX_LINE_CHARS = 64 * 1024 * 1024
_KEEPALIVE_S = 2.0
"""Below the few seconds after which servers close idle connections, so that none is reused at that very moment."""


class UpstreamClient:
    """One server. A request that has reached it is never repeated: it may have been paid for.

    The idle limit counts bytes, so the comments that keep a stream alive hold the line. Environment proxies are
    used for https only.
    """

    def __init__(self, base_url: str, key: str | None, *, connect_timeout_s: float, idle_timeout_s: float) -> None:
        self._base_url = base_url.rstrip("/")
        self._idle_s = idle_timeout_s
        self._http = httpx.AsyncClient(
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(idle_timeout_s, connect=connect_timeout_s),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S),
            trust_env=urlsplit(base_url).scheme == "https",
        )

    async def stream(self, body: bytes) -> AsyncGenerator[JSONObject, None]:
        """Send a request; yields the objects of its stream, of an answer in one piece that object. Closing it closes
        the connection, by which the server knows that nobody listens.

        Raises:
            UpstreamError: it cannot be reached, refuses, fails, falls silent, or its stream ends too early.
        """
        async with self._answer(body) as response:
            if response.status_code != 200:
                raise refused(response.status_code, await _beginning(response), response.headers)
            if "text/event-stream" not in response.headers.get("content-type", ""):
                yield _object((await response.aread()).decode("utf-8", "replace"))
                return
            async for data in _events(response):
                if data == "[DONE]":
                    return
                value = _object(data)
                if value.get("error"):
                    raise from_event(value["error"])
                yield value

    async def healthy(self, *, model: str | None = None) -> bool:
        """Whether it lists its models; with ``model``, whether that generates a token."""
        try:
            if model is None:
                response = await self._http.get(f"{self._base_url}/models", timeout=10)
            else:
                asked = {"model": model, "messages": [{"role": "user", "content": "1"}], "max_tokens": 1}
                response = await self._http.post(f"{self._base_url}/chat/completions", json=asked, timeout=60)
        except httpx.HTTPError:
            return False
        return response.status_code == 200

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    @asynccontextmanager
    async def _answer(self, body: bytes) -> AsyncGenerator[httpx.Response, None]:
        began = False
        headers = {"content-type": "application/json", "accept": "text/event-stream, application/json"}
        try:
            async with self._http.stream(
                "POST", f"{self._base_url}/chat/completions", content=body, headers=headers
            ) as response:
                began = True
                yield response
        except UpstreamError:
            raise
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise unreachable(f"no connection to {self._base_url}: {error or type(error).__name__}") from error
        except httpx.TimeoutException as error:
            raise silent(self._idle_s) from error
        except httpx.HTTPError as error:
            reason = f"{error or type(error).__name__}"
            raise (broken(reason) if began else unreachable(reason)) from error


async def _events(response: httpx.Response) -> AsyncGenerator[str, None]:
    """The data of server-sent events. Lines end with a line feed only, which JSON escapes."""
    kept = b""
    async for piece in response.aiter_bytes():
        *lines, kept = (kept + piece).split(b"\n")
        if len(kept) > MAX_LINE_CHARS:
            raise not_understood(f"a line of its stream has more than {MAX_LINE_CHARS} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip().decode("utf-8", "replace")
                if data:
                    yield data


async def _beginning(response: httpx.Response) -> bytes:
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_ERROR_BYTES:
            break
    return body[:MAX_ERROR_BYTES]


def _object(text: str) -> JSONObject:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise not_understood(f"{text[:80]!r} is not JSON") from error
    if not isinstance(value, dict):
        raise not_understood(f"{text[:80]!r} is no object")
    return cast("JSONObject", value)
