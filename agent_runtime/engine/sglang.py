"""Token-exact client of an SGLang engine: prompt ids to /generate, output ids back, abortable."""

import json
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

import anyio
import anyio.to_thread
import httpx

from agent_runtime.engine.output_ids import (
    DONE,
    OutputIds,
    engine_error,
    error_message,
    server_sent_data,
)
from agent_runtime.engine.types import Chunk, EngineImage, Generation, SamplingParams, expanded_len
from agent_runtime.errors import EngineProtocolError, EngineRejected, EngineTimeout, EngineUnavailable

logger = logging.getLogger(__name__)

_JSON = {"content-type": "application/json"}

ABORT_TIMEOUT_S = 3.0
"""How long closing an unfinished stream may wait for the engine to take the abort."""

CACHE_PATH = "/k3/cache"
"""Where the plugin serves the commands of its cache."""

CACHE_TIMEOUT_S = 60.0
"""A command waits for the running step, which may be a long prefill."""

_BROKEN = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
"""What using a connection that is just being closed raises."""

KEEPALIVE_S = 2.0
"""Idle time after which a connection is not used again: SGLang closes its own after 5 s."""

COLLECT_STREAM_INTERVAL = 32
"""Ids per event when nobody watches the stream; fewer events cost engine and gateway less."""


class SGLangEngine:
    """One engine at ``base_url``. Safe for any number of concurrent requests on one event loop.

    ``idle_timeout_s`` bounds the silence between two events: it must cover queueing plus the longest prefill.
    """

    def __init__(self, base_url: str, *, connect_timeout_s: float = 5.0, idle_timeout_s: float = 900.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._idle_timeout_s = idle_timeout_s
        self._open_streams: set[str] = set()
        self._all_closed: anyio.Event | None = None
        # The engine queues by itself: a limit here would only hide its queue. Proxies never apply to it.
        self._client = httpx.AsyncClient(
            base_url=self.base_url,
            timeout=httpx.Timeout(idle_timeout_s, connect=connect_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_S),
            trust_env=False,
        )

    async def stream(
        self, ids: Sequence[int], sampling: SamplingParams, rid: str, images: Sequence[EngineImage] = ()
    ) -> AsyncGenerator[Chunk, None]:
        """Generate from ``ids`` ``[prompt_len]``; yields chunks, the last one has ``finish``.

        ``images`` has one entry for each ``<|media_pad|>`` among the ids, in order.

        However the iteration ends before that, by an error, ``aclose`` or cancellation, the engine is told to
        abort ``rid``. The engine aborts by prefix: no rid in flight may be the beginning of another.
        Raises EngineRejected, EngineUnavailable, EngineTimeout, EngineAborted or EngineProtocolError.
        """
        running, sent = True, rid
        self._open_streams.add(rid)
        try:
            response, sent = await self._begun(ids, sampling, rid, images)
            async with aclosing(response):
                if response.status_code != 200:
                    running = False
                    raise engine_error(response.status_code, _message(await response.aread()), rid)
                output = OutputIds(sent, expanded_len(ids, images))
                async with aclosing(server_sent_data(response.aiter_bytes())) as payloads:
                    async for payload in payloads:
                        if payload == DONE:
                            continue  # reading to the very end lets the connection be used again
                        chunk = output.chunk(_event(payload, rid))
                        running = running and chunk.finish is None
                        yield chunk
            if running:
                raise EngineUnavailable("the engine closed the stream before the generation ended", rid)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            running = False
            raise EngineUnavailable(f"no engine answers at {self.base_url}: {error!r}", rid) from error
        except httpx.ReadTimeout as error:
            raise EngineTimeout(f"the engine sent nothing for {self._idle_timeout_s:g} s", rid) from error
        except httpx.TransportError as error:
            raise EngineUnavailable(f"the connection to the engine broke: {error!r}", rid) from error
        finally:
            if running:
                await self._abort_unfinished(sent)
            self._open_streams.discard(rid)
            if self._all_closed is not None and not self._open_streams:
                self._all_closed.set()

    async def _begun(
        self, ids: Sequence[int], sampling: SamplingParams, rid: str, images: Sequence[EngineImage]
    ) -> tuple[httpx.Response, str]:
        """The start of the engine's response, and the rid it runs under.

        Sent once more when the connection broke before it: a kept connection may be closed, by either side, in the
        moment it is taken again. What the engine may have got is aborted, and the second sending has another rid.
        """
        try:
            return await self._opened(ids, sampling, rid, images), rid
        except _BROKEN as error:
            logger.info("request %s is sent once more, its connection broke: %r", rid, error)
        await self._abort_unfinished(rid)
        again = secrets.token_hex(len(rid))[: len(rid)]
        try:
            return await self._opened(ids, sampling, again, images), again
        except BaseException:  # cancellation too: only here is this rid known
            await self._abort_unfinished(again)
            raise

    async def _opened(
        self, ids: Sequence[int], sampling: SamplingParams, rid: str, images: Sequence[EngineImage]
    ) -> httpx.Response:
        body = generate_body(ids, sampling, rid)
        content = await _with_images(body, images) if images else json_bytes(body)
        request = self._client.build_request("POST", "/generate", content=content, headers=_JSON)
        return await self._client.send(request, stream=True)

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, rid: str, images: Sequence[EngineImage] = ()
    ) -> Generation:
        """Generate the whole output. Cancelling the call aborts the request; errors as in ``stream``."""
        collected: list[int] = []
        coarse = {"stream_interval": COLLECT_STREAM_INTERVAL, **sampling}
        last: Chunk | None = None
        async with aclosing(self.stream(ids, coarse, rid, images)) as chunks:
            async for chunk in chunks:
                collected.extend(chunk.ids)
                last = chunk
        if last is None or last.finish is None:
            raise EngineProtocolError("the stream ended without a finish reason", rid)
        return Generation(tuple(collected), last.prompt_tokens, last.cached_tokens, last.finish)

    async def abort(self, rid: str) -> None:
        """Ask the engine to drop ``rid``. Raises EngineUnavailable when the engine cannot be told."""
        try:
            response = await self._client.post("/abort_request", json={"rid": rid})
        except httpx.TransportError as error:
            raise EngineUnavailable(f"could not send the abort to {self.base_url}: {error!r}", rid) from error
        if response.status_code != 200:
            raise engine_error(response.status_code, _message(response.content), rid)

    async def healthy(self, *, deep: bool = False) -> bool:
        """Whether the engine answers.

        The plain check asks SGLang's ``/ready``, which costs nothing; ``deep`` asks ``/health``, which
        generates a token and takes a second or more.
        """
        path, timeout_s = ("/health", 30.0) if deep else ("/ready", 5.0)
        try:
            response = await self._client.get(path, timeout=timeout_s)
        except httpx.TransportError:
            return False
        return response.status_code == 200

    async def server_info(self) -> dict[str, Any]:
        """SGLang's resolved server arguments and state. Raises EngineUnavailable or EngineProtocolError."""
        try:
            response = await self._client.get("/server_info", timeout=30.0)
        except httpx.TransportError as error:
            raise EngineUnavailable(f"no engine answers at {self.base_url}: {error!r}") from error
        if response.status_code != 200:
            raise engine_error(response.status_code, _message(response.content), None)
        return _event(response.content, None)

    async def cache_command(self, name: str, body: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Show (no ``body``) or steer the checkpoint cache. One answer for each rank asked.

        Raises EngineRejected when it cannot be done as asked, also by an engine without such commands;
        EngineUnavailable or EngineProtocolError otherwise.
        """
        path = f"{CACHE_PATH}/{name}"
        try:
            if body is None:
                response = await self._client.get(path, timeout=CACHE_TIMEOUT_S)
            else:
                response = await self._client.post(path, content=json_bytes(dict(body)), timeout=CACHE_TIMEOUT_S)
        except httpx.TransportError as error:
            raise EngineUnavailable(f"the engine did not answer {path}: {error!r}") from error
        if response.status_code in (404, 405, 409):
            raise EngineRejected(_message(response.content), None)
        if response.status_code != 200:
            raise engine_error(response.status_code, _message(response.content), None)
        ranks = _event(response.content, None).get("ranks")
        if not isinstance(ranks, list):
            raise EngineProtocolError(f"the answer to {path} has no list of ranks", None)
        return cast("list[dict[str, Any]]", ranks)

    async def aclose(self) -> None:
        """Close the connections, once streams that are being cancelled have sent their aborts.

        Streams that nobody ends are waited for that long too, then they fail with EngineUnavailable.
        """
        if self._open_streams:
            self._all_closed = anyio.Event()
            with anyio.move_on_after(ABORT_TIMEOUT_S):
                await self._all_closed.wait()
        await self._client.aclose()

    async def _abort_unfinished(self, rid: str) -> None:
        """Abort even in a task that is being cancelled; only logs a failure: the first error matters more."""
        with anyio.move_on_after(ABORT_TIMEOUT_S, shield=True) as scope:
            try:
                await self.abort(rid)
            except Exception as error:
                logger.warning("abort of %s failed: %s", rid, error)
        if scope.cancelled_caught:
            logger.warning("abort of %s: no answer from the engine within %g s", rid, ABORT_TIMEOUT_S)


def generate_body(ids: Sequence[int], sampling: SamplingParams, rid: str) -> dict[str, Any]:
    """Body of ``/generate`` for a prompt without images."""
    return {"input_ids": list(ids), "sampling_params": dict(sampling), "stream": True, "rid": rid}


async def _with_images(body: dict[str, Any], images: Sequence[EngineImage]) -> bytes:
    """The request as JSON, written on a thread: pictures may have many megabytes."""
    return await anyio.to_thread.run_sync(json_bytes, {**body, "image_data": [image.data_url for image in images]})


def json_bytes(body: dict[str, Any]) -> bytes:
    """A body as it goes over the wire."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _event(payload: bytes, rid: str | None) -> dict[str, Any]:
    try:
        event: Any = json.loads(payload)
    except ValueError as error:
        raise EngineProtocolError(f"the engine sent text that is not JSON: {payload[:200]!r}", rid) from error
    if not isinstance(event, dict):
        raise EngineProtocolError(f"the engine sent JSON that is not an object: {payload[:200]!r}", rid)
    return cast("dict[str, Any]", event)


def _message(content: bytes) -> str:
    try:
        return error_message(json.loads(content))
    except ValueError:
        return content.decode(errors="replace")[:1000] or "no message"
