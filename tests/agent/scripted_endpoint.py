"""An OpenAI-shaped chat endpoint on a loopback port that plays a script and records what it was asked."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

JSON = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """One scripted answer: the deltas to stream, then how the stream ends."""

    deltas: Sequence[JSON] = ()
    finish: str | None = "stop"
    usage: JSON | None = None
    end: Literal["done", "hang", "close"] = "done"
    """`done` ends the stream properly, `hang` sends nothing more, `close` drops the connection."""
    status: int = 200
    body: Any = None
    """JSON body of a reply that is no stream."""
    headers: Mapping[str, str] | None = None
    """Headers of a reply that is no stream."""
    comments: int = 0
    """Keep-alive comments sent first, one every 50 ms."""
    raw: str = ""
    """Event lines sent as they are, before anything else."""


def usage(prompt: int, completion: int, cached: int | None = None) -> JSON:
    """A usage object; without `cached` it has no details."""
    counts: JSON = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    return counts if cached is None else {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


def call(name: str, arguments: Any, *, index: int = 0, id: str | None = None) -> JSON:
    """A whole call in one delta; arguments that are no text are written as JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": name, "arguments": text}
    return {"tool_calls": [{"index": index, "id": id or f"c{index}", "type": "function", "function": function}]}


def calls(*wanted: tuple[str, Any], ids: str = "c", reasoning: str = "think") -> Reply:
    """A turn with thinking and the given calls."""
    made = [call(name, args, index=i, id=f"{ids}{i}") for i, (name, args) in enumerate(wanted)]
    return Reply([{"reasoning_content": reasoning}, *made], "tool_calls", usage(100, 10, 50))


def says(content: str, reasoning: str = "think") -> Reply:
    """A turn that answers in text."""
    return Reply([{"reasoning_content": reasoning}, {"content": content}], "stop", usage(100, 10, 50))


class Endpoint:
    """The running endpoint. Replies are used in order; the last one repeats."""

    def __init__(self, script: Sequence[Reply], url: str) -> None:
        self.base_url = url
        self.requests: list[JSON] = []
        self.keys: list[str | None] = []
        """The authorization of each request."""
        self.abandoned: list[JSON] = []
        """What was said about the cache."""
        self.has_cache = True
        self.disconnected = threading.Event()
        """Set when a client went away during a reply that hangs."""
        self._script = list(script)

    def next_reply(self) -> Reply:
        return self._script.pop(0) if len(self._script) > 1 else self._script[0]

    async def chat(self, request: Request) -> Response:
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        reply = self.next_reply()
        if reply.status != 200:
            return JSONResponse(reply.body, reply.status, reply.headers)
        return _Stream(reply, self.disconnected)

    async def abandon(self, request: Request) -> Response:
        self.abandoned.append(await request.json())
        return JSONResponse({"object": "k3.cache.abandon", "ranks": []}, 200 if self.has_cache else 409)

    async def models(self, _: Request) -> Response:
        model = {"id": "scripted", "object": "model", "created": 0, "owned_by": "tests"}
        return JSONResponse({"object": "list", "data": [model]})


class _Stream(Response):
    def __init__(self, reply: Reply, disconnected: threading.Event) -> None:
        super().__init__()
        self._reply = reply
        self._disconnected = disconnected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(self._reply.comments):
            await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})
            await asyncio.sleep(0.05)
        for line in _lines(self._reply):
            await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
        if self._reply.end == "hang":
            while (await receive())["type"] != "http.disconnect":
                pass
            self._disconnected.set()
        elif self._reply.end == "done":
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        else:
            # An unfinished chunked body: the server drops the connection.
            raise ConnectionAbortedError("scripted")


def _lines(reply: Reply) -> Iterator[str]:
    if reply.raw:
        yield reply.raw
    yield _event({"role": "assistant"}, None)
    for delta in reply.deltas:
        yield _event(delta, None)
    if reply.finish is not None:
        yield _event({}, reply.finish)
    if reply.usage is not None:
        yield f"data: {json.dumps({**_HEAD, 'choices': [], 'usage': reply.usage})}\n\n"


def _event(delta: JSON, finish: str | None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({**_HEAD, 'choices': [choice]})}\n\n"


_HEAD = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "scripted"}


@contextmanager
def serve(*script: Reply) -> Iterator[Endpoint]:
    """Serve the script on a free loopback port until the block ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = Endpoint(script, f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
            Route("/v1/models", endpoint.models),
            Route("/v1/k3/cache/abandon", endpoint.abandon, methods=["POST"]),
        ]
    )
    config = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield endpoint
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
