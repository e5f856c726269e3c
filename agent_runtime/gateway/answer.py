"""Sends a completion to its client, as one object or as a stream, and aborts it when the client leaves."""

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from agent_runtime.gateway.job import Gateway, Job
from agent_runtime.gateway.run import ChoiceEnd, Failure, Item, NewDelta, run_choices
from agent_runtime.gateway.wire import DONE_EVENT, KEEP_ALIVE_COMMENT, error_event

logger = logging.getLogger(__name__)

BUFFERED_ITEMS = 16
"""Items between engine and client: a client that does not read stops its own generation's reader, no other."""


class Answer:
    """An ASGI response that runs the job while it is being sent."""

    def __init__(self, gateway: Gateway, job: Job) -> None:
        self._gateway = gateway
        self._job = job
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
                tasks.start_soon(_cancel_on_disconnect, receive, tasks.cancel_scope)
                tasks.start_soon(run_choices, self._gateway, self._job, out)
                async with items:
                    try:
                        outcome = await respond(items, scope, receive, send)
                    except OSError as error:  # servers differ: some raise when the client is gone
                        logger.info("completion %s: sending failed: %r", self._job.envelope.id, error)
                    tasks.cancel_scope.cancel()
        finally:
            self._log(outcome)

    async def _send_object(
        self, items: MemoryObjectReceiveStream[Item], scope: Scope, receive: Receive, send: Send
    ) -> str:
        async for item in items:
            self._note(item)
            if isinstance(item, Failure):
                await item.error.response()(scope, receive, send)
                return f"error {item.error.status}"
        ends = [self._ends[index] for index in range(self._job.n)]
        body = self._job.envelope.completion(
            self._job.request.start, [end.delivered for end in ends], [end.usage for end in ends]
        )
        await JSONResponse(body, headers=self._job.headers())(scope, receive, send)
        return "done"

    async def _send_stream(
        self, items: MemoryObjectReceiveStream[Item], scope: Scope, receive: Receive, send: Send
    ) -> str:
        started = False
        begun: set[int] = set()
        async with aclosing(_batches(items, self._gateway.settings.keep_alive_s)) as batches:
            async for batch in batches:
                failure = next((item for item in batch if isinstance(item, Failure)), None)
                if failure is not None and not started:
                    await failure.error.response()(scope, receive, send)
                    return f"error {failure.error.status}"
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self._stream_headers()})
                events = b"".join(self._event(item, begun) for item in batch) or KEEP_ALIVE_COMMENT
                if failure is not None:
                    await _send_body(send, events + DONE_EVENT, more=False)
                    return f"error {failure.error.status} in mid-stream"
                await _send_body(send, events)
        await _send_body(send, self._last_events(), more=False)
        return "done"

    def _event(self, item: Item, begun: set[int]) -> bytes:
        self._note(item)
        if isinstance(item, Failure):
            return error_event(item.error)
        envelope = self._job.envelope
        head = b""
        if item.index not in begun:
            begun.add(item.index)
            head = envelope.delta(item.index, {"role": "assistant", "content": ""})
        if isinstance(item, NewDelta):
            return head + envelope.delta(item.index, item.delta)
        return head + envelope.end(item.index, item.delivered, item.usage)

    def _last_events(self) -> bytes:
        if not self._job.options.include_usage:
            return DONE_EVENT
        usages = [self._ends[index].usage for index in range(self._job.n)]
        return self._job.envelope.usage(usages) + DONE_EVENT

    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self._job.headers(),
        }
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
            job.envelope.id,
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


async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    """The request body has been read, so the only message left is that the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _batches(items: MemoryObjectReceiveStream[Item], silence_s: float) -> AsyncGenerator[list[Item], None]:
    """What has arrived, in order; an empty list whenever nothing came for ``silence_s``."""
    while True:
        batch: list[Item] = []
        with anyio.move_on_after(silence_s):
            try:
                batch.append(await items.receive())
            except anyio.EndOfStream:
                return
        with suppress(anyio.WouldBlock, anyio.EndOfStream):
            while True:
                batch.append(items.receive_nowait())
        yield batch


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
