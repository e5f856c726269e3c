"""A proxy between a client and a server that keeps every exchange, and one that refuses all other hosts."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

START_TIMEOUT_S = 20
IDLE_TIMEOUT_S = 600
HOP_HEADERS = frozenset({"host", "connection", "content-length", "transfer-encoding", "keep-alive", "te", "upgrade"})
"""Headers that belong to one connection, so each side of the proxy has its own."""
BAD_GATEWAY = 502
FORBIDDEN = 403


@dataclass
class Exchange:
    """One request and what was answered, as far as the client read it."""

    method: str
    path: str
    request: bytes
    status: int = 0
    """0 until the server answered."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of the answer, names in lower case."""
    response: bytes = b""


class Recorder:
    """Forwards requests to one server and keeps the exchanges; :meth:`take` empties the list."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._exchanges: list[Exchange] = []
        self._lock = threading.Lock()
        self._http = httpx.AsyncClient(timeout=IDLE_TIMEOUT_S, trust_env=False)

    def take(self) -> list[Exchange]:
        """Everything recorded since the last call."""
        with self._lock:
            taken, self._exchanges = self._exchanges, []
        return taken

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncGenerator[None, None]:
        """Closes the connections to the server with the loop that made them."""
        async with self._http:
            yield

    async def forward(self, request: Request) -> Response:
        """Send one request on, and stream back what comes."""
        exchange = Exchange(request.method, request.url.path, await request.body())
        with self._lock:
            self._exchanges.append(exchange)
        url = f"{self._target}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: value for name, value in request.headers.items() if name not in HOP_HEADERS}
        headers["accept-encoding"] = "identity"
        sent = self._http.build_request(request.method, url, headers=headers, content=exchange.request)
        try:
            answer = await self._http.send(sent, stream=True)
        except httpx.HTTPError as error:
            exchange.status, exchange.response = BAD_GATEWAY, str(error).encode()
            return PlainTextResponse(f"the recorder cannot reach {self._target}: {error}", BAD_GATEWAY)
        exchange.status, exchange.headers = answer.status_code, dict(answer.headers)
        kept = {name: value for name, value in answer.headers.items() if name not in HOP_HEADERS}
        return StreamingResponse(_copied(answer, exchange), answer.status_code, kept)


async def _copied(answer: httpx.Response, exchange: Exchange) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in answer.aiter_raw():
            exchange.response += piece
            yield piece
    finally:
        await answer.aclose()  # a client that leaves is a client that leaves, for the server too


class Fence:
    """A forward proxy that lets nothing out and keeps the names of the hosts that were asked for."""

    def __init__(self) -> None:
        self._hosts: list[str] = []

    def take(self) -> list[str]:
        """Hosts asked for since the last call, each once, in order."""
        taken, self._hosts = list(dict.fromkeys(self._hosts)), []
        return taken

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: refuse, whatever it is."""
        if scope["type"] != "http":
            return
        self._hosts.append(Request(scope).headers.get("host", scope["path"]).partition(":")[0])
        await PlainTextResponse("nothing outside this machine is reachable here", FORBIDDEN)(scope, receive, send)


@contextlib.contextmanager
def recording(target: str) -> Iterator[tuple[Recorder, str]]:
    """A running recorder in front of a server, and its URL."""
    recorder = Recorder(target)
    methods = ["GET", "POST", "DELETE", "PUT", "HEAD"]
    app = Starlette(routes=[Route("/{path:path}", recorder.forward, methods=methods)], lifespan=recorder.lifespan)
    with _serving(app) as url:
        yield recorder, url


@contextlib.contextmanager
def fenced() -> Iterator[tuple[Fence, str]]:
    """A running fence and its URL, for ``HTTP_PROXY`` and ``HTTPS_PROXY``."""
    fence = Fence()
    with _serving(fence) as url:
        yield fence, url


@contextlib.contextmanager
def _serving(app: Starlette | Fence) -> Iterator[str]:
    """Serve an ASGI application on a free port of the loopback interface, in a thread."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    # httptools would answer CONNECT by closing; h11 hands it to the application as any other method.
    # The loop is asyncio's: uvloop's handles outlive a loop that ends in a thread, and warn.
    config = uvicorn.Config(app, log_level="error", http="h11", loop="asyncio", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    started = threading.Event()
    for _ in range(START_TIMEOUT_S * 20):
        if server.started or started.wait(0.05):
            break
    else:
        raise TimeoutError(f"the recorder did not start within {START_TIMEOUT_S} s")
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)
        listening.close()
