"""A scripted server that speaks SGLang's /generate, for failures and timings no real engine has on request."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Step = Sequence[int] | Callable[[], Awaitable[Any]] | Exception
Event = dict[str, Any]


@dataclass
class Script:
    """What one request gets: runs of ids, awaitables to pause at, an exception to break the connection at.

    ``finish`` None sends no end: the engine waits until the request is aborted.
    """

    steps: list[Step]
    finish: dict[str, Any] | None
    status: int = 200
    error: Any = None
    cached_tokens: int = 0
    cache_facts: dict[str, Any] | None = None


@dataclass
class StubEngine:
    """Answers with the script that ``plan`` returns for a request body; keeps what was asked."""

    plan: Callable[[dict[str, Any]], Script]
    incremental: bool = False
    ready: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    bodies: list[bytes] = field(default_factory=list[bytes])
    """The same requests as they came over the wire."""
    client_ports: set[int] = field(default_factory=set[int])
    aborts: list[str] = field(default_factory=list[str])
    image_tokens: list[int] = field(default_factory=list[int])
    """Positions this engine puts in the place of each image's pad, for the images of any one request in order."""
    cache_backend: str | None = None
    """Name of the prefix cache that this engine says it has."""
    commands: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    """What its cache was told: command and body, None for a GET."""
    cache_metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    """Counters of that cache."""
    dump: dict[str, Any] = field(default_factory=dict[str, Any])
    """What its cache shows of its tree."""
    refusal: str | None = None
    """What every command of the cache is refused with."""
    running: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def app(self) -> Starlette:
        """The server."""
        return Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST"]),
                Route("/abort_request", self._abort, methods=["POST"]),
                Route("/ready", self._ready),
                Route("/health", self._ready),
                Route("/server_info", self._server_info),
                Route("/k3/cache/{name}", self._command, methods=["GET", "POST"]),
            ]
        )

    async def until(self, condition: Callable[["StubEngine"], bool]) -> None:
        """Wait until ``condition(self)`` holds; bounded by the test's own timeout."""
        async with self.changed:
            await self.changed.wait_for(lambda: condition(self))

    async def _ready(self, request: Request) -> Response:
        return Response(status_code=200 if self.ready else 503)

    async def _server_info(self, request: Request) -> Response:
        cache = {} if self.cache_backend is None else {"radix_cache_backend": self.cache_backend}
        return JSONResponse({"version": "stub", **cache})

    async def _command(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.commands.append((name, await request.json() if request.method == "POST" else None))
        if self.refusal is not None:
            return JSONResponse({"error": {"message": self.refusal}}, status_code=400)
        told = {"metrics": self.cache_metrics} if name == "metrics" else self.dump if name == "dump" else {}
        return JSONResponse({"ranks": [{"dp_rank": 0, "tp_rank": 0, **told}]})

    async def _abort(self, request: Request) -> Response:
        rid = (await request.json())["rid"]
        self.aborts.append(rid)
        if rid in self.running:
            self.running[rid].set()
        await self._notify()
        return Response()

    async def _generate(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        body = await request.json()
        self.requests.append(body)
        assert request.client is not None
        self.client_ports.add(request.client.port)
        script = self.plan(body)
        if script.status != 200:
            return JSONResponse(script.error, status_code=script.status)
        return StreamingResponse(self._events(body, script), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any], script: Script) -> AsyncGenerator[bytes, None]:
        rid = body["rid"]
        aborted = self.running[rid] = asyncio.Event()
        await self._notify()
        ids: list[int] = []
        try:
            if script.error is not None:
                yield _event({"error": script.error})
                return
            for step in script.steps:
                if isinstance(step, Exception):
                    raise step
                if callable(step):
                    await _first(step(), aborted.wait())
                    if aborted.is_set():
                        break
                    continue
                ids.extend(step)
                yield self._output(rid, body, script, ids, len(step), None)
            if script.finish is None and not aborted.is_set():
                await aborted.wait()
            finish = {"type": "abort", "message": "Abort before prefill"} if aborted.is_set() else script.finish
            yield self._output(rid, body, script, ids, 1 if aborted.is_set() else 0, finish)
            yield b"data: [DONE]\n\n"
        finally:
            del self.running[rid]
            await asyncio.shield(self._notify())

    def _output(
        self,
        rid: str,
        body: dict[str, Any],
        script: Script,
        ids: list[int],
        new_tokens: int,
        finish: dict[str, Any] | None,
    ) -> bytes:
        shown = ids[len(ids) - new_tokens :] if self.incremental else ids
        meta = {
            "id": rid,
            "prompt_tokens": len(body["input_ids"]) + sum(tokens - 1 for tokens in self._expanded(body)),
            "completion_tokens": len(ids),
            "cached_tokens": script.cached_tokens,
            "finish_reason": finish,
            **({} if script.cache_facts is None else {"k3_cache": [script.cache_facts]}),
        }
        # A line separator inside the text is legal JSON and must not end the event.
        return _event({"text": "\u2028 \u0085", "output_ids": shown, "meta_info": meta})

    def _expanded(self, body: dict[str, Any]) -> list[int]:
        return self.image_tokens[: len(body.get("image_data", ()))]

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


async def _first(*waits: Awaitable[Any]) -> None:
    """Return when the first of some waits is over, and drop the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _event(value: Event) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def says(ids: Sequence[int], *, end_of_msg: int, cached_tokens: int = 0, piece: int = 1) -> Script:
    """A script that generates ``ids`` in runs of ``piece`` and stops at the end-of-message id."""
    runs: list[Step] = [ids[i : i + piece] for i in range(0, len(ids), piece)]
    return Script(runs, {"type": "stop", "matched": end_of_msg}, cached_tokens=cached_tokens)


def cut(ids: Sequence[int], *, piece: int = 1) -> Script:
    """A script that generates ``ids`` and then has used up its budget."""
    runs: list[Step] = [ids[i : i + piece] for i in range(0, len(ids), piece)]
    return Script(runs, {"type": "length", "length": len(ids)})
