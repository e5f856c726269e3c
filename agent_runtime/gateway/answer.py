"""Sends a completion to its client, as one object or as a stream, and aborts it when the client leaves."""

import logging
import time
from contextlib import suppress

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from agent_runtime.gateway.completion import ChoiceEnd, Failure, Item, Wire
from agent_runtime.gateway.job import Gateway, Job
from agent_runtime.gateway.run import run_choices
from agent_runtime.gateway.sse import STREAM_HEADERS

logger = logging.getLogger(__name__)

BUFFERED_ITEMS = 16
"""Items between engine and client: a client that does not read stops its own generation's reader, no other."""


class Answer:
    """An ASGI response that runs the job while it is being sent, in the words of a protocol."""

    def __init__(self, gateway: Gateway, job: Job, wire: Wire) -> None:
        self._gateway = gateway
        self._job = job
        self._wire = wire
        self._ends: dict[int, ChoiceEnd] = {}
        self._began_s = time.monotonic()
        self._first_item_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; returns when all is sent or the client has left and the engine was told."""
        respond = self._send_stream if self._job.options.stream else self._send_object
        outcome = "client left"
        try:
            async with anyio.create_task_group() as tasks:
                out, items = anyio.create_memory_object_stream[Item](BUFFERED_ITEMS)
                tasks.start_soon(cancel_on_disconnect, receive, tasks.cancel_scope)
                tasks.start_soon(run_choices, self._gateway, self._job, out)
                async with items:
                    try:
                        outcome = await respond(items, scope, receive, send)
                    except OSError as error:  # servers differ: some raise when the client is gone
                        logger.info("completion %s: sending failed: %r", self._wire.id, error)
                    tasks.cancel_scope.cancel()
        finally:
            self._log(outcome)

    async def _send_object(
        self, items: MemoryObjectReceiveStream[Item], scope: Scope, receive: Receive, send: Send
    ) -> str:
        async for item in items:
            self._note(item)
            if isinstance(item, Failure):
                await self._wire.refusal(item.error)(scope, receive, send)
                return f"error {item.error.status}"
        body = self._wire.whole(self._all_ends())
        await JSONResponse(body, headers=self._headers())(scope, receive, send)
        return "done"

    async def _send_stream(
        self, items: MemoryObjectReceiveStream[Item], scope: Scope, receive: Receive, send: Send
    ) -> str:
        wire, keep_alive_s = self._wire, self._gateway.settings.keep_alive_s
        started = False
        silent_since_s = anyio.current_time()
        while (batch := await _batch(items, silent_since_s + keep_alive_s)) is not None:
            failure = next((item for item in batch if isinstance(item, Failure)), None)
            if failure is not None and not started:
                await wire.refusal(failure.error)(scope, receive, send)
                return f"error {failure.error.status}"
            events = b"".join(map(self._events, batch)) if batch else wire.keep_alive
            if failure is not None:
                await _send_body(send, events + wire.failure_events(failure.error), more=False)
                return f"error {failure.error.status} in mid-stream"
            if not events:
                continue
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": self._stream_headers()})
            await _send_body(send, events)
            silent_since_s = anyio.current_time()
        await _send_body(send, wire.last_events(self._all_ends()), more=False)
        return "done"

    def _events(self, item: Item) -> bytes:
        self._note(item)
        return b"" if isinstance(item, Failure) else self._wire.events(item)

    def _all_ends(self) -> list[ChoiceEnd]:
        return [self._ends[index] for index in range(self._job.n)]

    def _headers(self) -> dict[str, str]:
        return {**self._job.headers(), **self._wire.headers()}

    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        headers = {**STREAM_HEADERS, **self._headers()}
        return [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]

    def _note(self, item: Item) -> None:
        if self._first_item_s is None:
            self._first_item_s = time.monotonic()
        if isinstance(item, ChoiceEnd):
            self._ends[item.index] = item

    def _log(self, outcome: str) -> None:
        """One line per completion: counts and times, never content."""
        job = self._job
        now_s = time.monotonic()
        usages = [end.usage for end in self._ends.values()]
        logger.info(
            "completion %s session=%r prompt=%d images=%d cached=%d output=%d replay=%r first_ms=%.0f total_ms=%.0f %s",
            self._wire.id,
            job.session.engine_name if job.session is not None else "",
            job.replayed.prompt_tokens,
            len(job.replayed.images),
            max((usage.cached_tokens for usage in usages), default=0),
            sum(usage.completion_tokens for usage in usages),
            job.replayed.replay.header(),
            1000 * ((self._first_item_s or now_s) - self._began_s),
            1000 * (now_s - self._began_s),
            outcome,
        )


async def cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    """The request body has been read, so the only message left is that the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _batch(items: MemoryObjectReceiveStream[Item], until_s: float) -> list[Item] | None:
    """What has arrived, in order; empty when nothing came until then, None when no more comes."""
    batch: list[Item] = []
    with anyio.CancelScope(deadline=until_s):
        try:
            batch.append(await items.receive())
        except anyio.EndOfStream:
            return None
    with suppress(anyio.WouldBlock, anyio.EndOfStream):
        while True:
            batch.append(items.receive_nowait())
    return batch


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
