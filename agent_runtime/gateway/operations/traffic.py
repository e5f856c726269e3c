"""Stands around the application: counts its answers, knows what is at work, and turns work away while draining."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent_runtime.gateway.errors import CLIENT_CLOSED_REQUEST, ERROR_WORD, ApiError
from agent_runtime.gateway.operations.drain import Drain
from agent_runtime.gateway.operations.instruments import Instruments

ARRIVED_S = "k3.arrived_s"
"""Key of the scope: monotonic time at which the request's headers were there."""
OTHER = "other"
_PROTOCOLS = (
    ("/v1/chat/completions", "chat"),
    ("/v1/messages", "messages"),
    ("/v1/responses", "responses"),
    ("/v1/completions", "completions"),
)


def protocol_of(path: str) -> str:
    """The protocol a path belongs to; ``other`` for what is of none."""
    return next((name for prefix, name in _PROTOCOLS if path == prefix or path.startswith(f"{prefix}/")), OTHER)


class Traffic:
    """ASGI middleware around everything else. ``refuse`` makes the answer to a request in the words of its protocol."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Sequence[Route],
        drain: Drain,
        instruments: Instruments | None,
        refuse: Callable[[Scope, ApiError], Response],
    ) -> None:
        self._app = app
        self._paths: Mapping[Hashable, str] = {route.endpoint: route.path for route in routes}
        self._drain = drain
        self._instruments = instruments
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[ARRIVED_S] = time.monotonic()
        status = CLIENT_CLOSED_REQUEST

        async def noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        is_work = scope["method"] == "POST"
        try:
            if is_work and self._drain.begun:
                await self._refuse(scope, self._drain.refusal())(scope, receive, noting_status)
                return
            self._drain.working += is_work
            try:
                await self._app(scope, receive, noting_status)
            finally:
                self._drain.working -= is_work
        except Exception:
            status = 500
            raise
        finally:
            self._count(scope, status)

    def _count(self, scope: Scope, status: int) -> None:
        if self._instruments is None:
            return
        protocol = protocol_of(scope["path"])
        endpoint: Any = scope.get("endpoint")
        route = self._paths.get(endpoint, OTHER) if endpoint is not None else OTHER
        self._instruments.requests.labels(protocol, route, str(status)).inc()
        if (word := scope.get(ERROR_WORD)) is not None:
            self._instruments.error(protocol, word)
