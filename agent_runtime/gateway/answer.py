"""Sends a completion to its client, as one object or as a stream, and aborts it when the client leaves."""

import logging
from contextlib import suppress

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from agent_runtime.gateway.completion import ChoiceEnd, Failure, Item, Wire
from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.job import Gateway, Job
from agent_runtime.gateway.operations.logs import completion_fields
from agent_runtime.gateway.operations.meter import DONE, Meter
from agent_runtime.gateway.operations.traffic import ARRIVED_S
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
        self._meter = Meter(gateway.instruments, wire.protocol)
        self._work = anyio.CancelScope()
        self._aborted: ApiError | None = None

    def abort(self, error: ApiError) -> None:
        """End the job now, as a failure that its client is told of; nothing happens when it has ended."""
        self._aborted = error
        self._work.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; returns when all is sent or the client has left and the engine was told."""
        respond = self._send_stream if self._job.options.stream else self._send_object
        self._meter.began_s = scope.get(ARRIVED_S, self._meter.began_s)
        try:
            with self._meter:
                async with anyio.create_task_group() as tasks:
                    out, items = anyio.create_memory_object_stream[Item](BUFFERED_ITEMS)
                    tasks.start_soon(cancel_on_disconnect, receive, tasks.cancel_scope)
                    tasks.start_soon(self._run, out)
                    async with items:
                        try:
                            await respond(items, scope, receive, send)
                        except OSError as error:  # servers differ: some raise when the client is gone
                            logger.info("completion %s: sending failed: %r", self._wire.id, error)
                        tasks.cancel_scope.cancel()
        finally:
            self._log()

    async def _run(self, out: MemoryObjectSendStream[Item]) -> None:
        async with out:
            with self._work:
                await run_choices(self._gateway, self._job, out.clone())
            if self._work.cancelled_caught and self._aborted is not None:
                await out.send(Failure(self._aborted))

    async def _send_object(
        self, items: MemoryObjectReceiveStream[Item], scope: Scope, receive: Receive, send: Send
    ) -> None:
        async for item in items:
            self._note(item)
            if isinstance(item, Failure):
                await self._wire.refusal(item.error)(scope, receive, send)
                self._meter.failed(item.error, in_stream=False)
                return
        body = self._wire.whole(self._all_ends())
        await JSONResponse(body, headers=self._headers())(scope, receive, send)
        self._meter.outcome = DONE

    async def _send_stream(
        self, items: MemoryObjectReceiveStream[Item], scope: Scope, receive: Receive, send: Send
    ) -> None:
        wire, keep_alive_s = self._wire, self._gateway.settings.keep_alive_s
        started = False
        silent_since_s = anyio.current_time()
        while (batch := await _batch(items, silent_since_s + keep_alive_s)) is not None:
            failure = next((item for item in batch if isinstance(item, Failure)), None)
            if failure is not None and not started:
                await wire.refusal(failure.error)(scope, receive, send)
                self._meter.failed(failure.error, in_stream=False)
                return
            events = b"".join(map(self._events, batch)) if batch else wire.keep_alive
            if failure is not None:
                await _send_body(send, events + wire.failure_events(failure.error), more=False)
                self._meter.failed(failure.error, in_stream=True)
                return
            if not events:
                continue
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": self._stream_headers()})
            await _send_body(send, events)
            silent_since_s = anyio.current_time()
        await _send_body(send, wire.last_events(self._all_ends()), more=False)
        self._meter.outcome = DONE

    def _events(self, item: Item) -> bytes:
        self._note(item)
        return b"" if isinstance(item, Failure) else self._wire.events(item)

    def _all_ends(self) -> list[ChoiceEnd]:
        return [self._meter.ends[index] for index in range(self._job.n)]

    def _headers(self) -> dict[str, str]:
        return {**self._job.headers(), **self._wire.headers()}

    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        headers = {**STREAM_HEADERS, **self._headers()}
        return [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]

    def _note(self, item: Item) -> None:
        self._meter.item(item, self._job.replayed.prompt_tokens)

    def _log(self) -> None:
        """One line per completion: counts and times, never content."""
        fields = completion_fields(self._wire.id, self._job, self._meter)
        logger.info(
            "completion %(id)s session=%(session)r prompt=%(prompt_tokens)d images=%(images)d cached=%(cached_tokens)d "
            "output=%(output_tokens)d replay=%(replay)r first_ms=%(first_ms).0f total_ms=%(total_ms).0f %(outcome)s",
            fields,
            extra={"fields": fields},
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
