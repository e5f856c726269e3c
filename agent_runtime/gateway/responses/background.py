"""Responses that run while nobody waits: started, cancelled, ended with the server."""

import logging
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from agent_runtime.gateway.completion import ChoiceEnd, Failure, Item
from agent_runtime.gateway.errors import RETRY_AFTER_S, ApiError, internal_error
from agent_runtime.gateway.job import Gateway, Job
from agent_runtime.gateway.operations.logs import completion_fields
from agent_runtime.gateway.operations.meter import DONE, Meter
from agent_runtime.gateway.responses.wire import ResponsesWire
from agent_runtime.gateway.run import run_choices
from agent_runtime.gateway.slots import Slot

logger = logging.getLogger(__name__)

MAX_RUNNING = 64
"""Of one owner. Each holds a request of the engine that no client can end by leaving."""


class Background:
    """Runs jobs as tasks of the server."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tasks: TaskGroup | None = None
        self._running: dict[str, anyio.CancelScope] = {}
        self._of_owner: Counter[str] = Counter()

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None, None]:
        """While it lasts, jobs run; at its end the ones left are aborted."""
        async with anyio.create_task_group() as self._tasks:
            yield
            self._tasks.cancel_scope.cancel()
        self._tasks = None

    def check_room(self, owner: str) -> None:
        """Raise ApiError when no more of an owner's can run."""
        if self._tasks is None:
            raise ApiError(503, "The server is not running tasks.", code="unavailable", type="server_error")
        if self._of_owner[owner] >= MAX_RUNNING:
            raise ApiError(
                429,
                f"{MAX_RUNNING} responses run in the background, and no more may. Wait for one, or cancel one.",
                code="rate_limit_exceeded",
                type="rate_limit_error",
                headers={"retry-after": str(RETRY_AFTER_S)},
            )

    def start(self, job: Job, wire: ResponsesWire, owner: str, slot: Slot) -> None:
        """Run an owner's job to its end, which frees ``slot``; ``wire`` has the response."""
        assert self._tasks is not None, "check_room comes first"
        scope = self._running[wire.id] = anyio.CancelScope()
        self._of_owner[owner] += 1
        slot.keep()
        self._gateway.drain.working += 1  # here, while the request that starts it still counts
        self._tasks.start_soon(self._run, job, wire, scope, owner, slot)

    def cancel(self, name: str) -> None:
        """Abort a response that runs; nothing happens to others."""
        if name in self._running:
            self._running[name].cancel()

    async def _run(self, job: Job, wire: ResponsesWire, scope: anyio.CancelScope, owner: str, slot: Slot) -> None:
        meter = Meter(self._gateway.instruments, wire.protocol)
        try:
            with scope, meter:
                await self._guarded(job, wire, meter)
        finally:
            self._gateway.drain.working -= 1
            del self._running[wire.id]
            self._of_owner[owner] -= 1
            slot.free()
            wire.left()  # when it was cancelled, else it is over already
            fields = {**completion_fields(wire.id, job, meter), "response": wire.response["status"]}
            logger.info(
                "response %(id)s in the background: %(response)s after %(total_ms).0f ms",
                fields,
                extra={"fields": fields},
            )

    async def _guarded(self, job: Job, wire: ResponsesWire, meter: Meter) -> None:
        try:
            await self._collect(job, wire, meter)
        except Exception:
            logger.exception("response %s in the background failed", wire.id)
            error = internal_error()
            wire.fail(error)
            meter.failed(error, in_stream=True)

    async def _collect(self, job: Job, wire: ResponsesWire, meter: Meter) -> None:
        ends: list[ChoiceEnd] = []
        out, items = anyio.create_memory_object_stream[Item](1)
        async with anyio.create_task_group() as tasks, items:
            tasks.start_soon(run_choices, self._gateway, job, out)
            async for item in items:
                meter.item(item, job.replayed.prompt_tokens)
                if isinstance(item, ChoiceEnd):
                    ends.append(item)
                elif isinstance(item, Failure):
                    wire.fail(item.error)
                    meter.failed(item.error, in_stream=True)
                    return
        wire.whole(ends)
        meter.outcome = DONE
