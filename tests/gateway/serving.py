"""Serves an ASGI application on a free port of the loopback interface, inside the test's event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

GRACE_S = 1.0


class _Server(uvicorn.Server):
    """A server that stops at once when told, instead of looking ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stop.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in self.servers:
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            _, late = await asyncio.wait(self.server_state.tasks, timeout=GRACE_S)
            for task in late:
                task.cancel()
        await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # Ctrl-C belongs to pytest


@asynccontextmanager
async def serving(app: ASGIApp, http: type[asyncio.Protocol] | None = None) -> AsyncGenerator[str, None]:
    """The base URL while the application is served; on leaving it is shut down like a process would."""
    # Named as TCP, for asyncio switches off Nagle's algorithm only where it reads that name.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", http=http or "auto")
    server = _Server(config)
    # The socket listens already, so a client may connect at once and waits in its queue.
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.stop.set()
        await task
        listener.close()
