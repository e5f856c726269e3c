"""ASGI middleware of routes: a request is handled once it has a slot, which is free again however that ends."""

from collections import deque
from collections.abc import Awaitable, Callable

import anyio
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.operations.drain import Drain
from agent_runtime.gateway.owner import NO_OWNER, OWNER
from agent_runtime.gateway.shape import in_shape
from agent_runtime.gateway.slots import Slot, Slots

HELD_BYTES = 1024 * 1024
"""How much of its body is taken from a request that waits: whoever has sent it whole is seen leaving."""

_SLOT = "k3.slot"


def admitted(route: Route, slots: Slots, drain: Drain) -> Route:
    """The same route, behind slots. Who waits for one when the gateway drains is turned away."""
    methods = sorted(route.methods or ())
    return Route(
        route.path, route.endpoint, methods=methods, middleware=[Middleware(Admission, slots=slots, drain=drain)]
    )


def slot_of(scope: Scope) -> Slot:
    """The slot that a request of an admitted route has."""
    return scope[_SLOT]


class Admission:
    """Gives each request a slot, in its turn."""

    def __init__(self, app: ASGIApp, slots: Slots, drain: Drain) -> None:
        self._app = app
        self._slots = slots
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait if need be; refuse, serve, or end with a client that leaves the queue."""
        owner = scope.get(OWNER, NO_OWNER)
        try:
            slot = self._slots.take_now(owner)
            if slot is None:
                held = _HeldBody(receive)
                slot = await self._wait(owner, held)
                receive = held.receive
                if slot is None:
                    return
        except ApiError as error:
            await in_shape(scope, error)(scope, receive, send)
            return
        try:
            scope[_SLOT] = slot
            await self._app(scope, receive, send)
        finally:
            slot.answered()

    async def _wait(self, owner: str, held: "_HeldBody") -> Slot | None:
        """A slot, or None when the client has left. Raises ApiError when it waited too long, or the gateway drains."""
        slot: Slot | None = None
        try:
            async with anyio.create_task_group() as tasks:

                async def leave_after(end: Callable[[], Awaitable[None]]) -> None:
                    await end()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(leave_after, held.until_left)
                tasks.start_soon(leave_after, self._drain.until_begun)
                slot = await self._slots.wait(owner)
                tasks.cancel_scope.cancel()
        except BaseException:
            if slot is not None:
                slot.free()
            raise
        if slot is None and not held.left:
            raise self._drain.refusal() if self._drain.begun else self._slots.waited_too_long(owner)
        return slot


class _HeldBody:
    """The beginning of a body, read while its request waits, and given out afterwards."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: deque[Message] = deque()
        self.left = False

    async def until_left(self) -> None:
        """Read until the client has gone, or there is so much that the rest is left to the socket."""
        size = 0
        while size <= HELD_BYTES:
            message = await self._receive()
            self._messages.append(message)
            size += len(message.get("body", b""))
            if message["type"] == "http.disconnect":
                self.left = True
                return
        await anyio.sleep_forever()

    async def receive(self) -> Message:
        """ASGI's receive: what is held, then what comes."""
        return self._messages.popleft() if self._messages else await self._receive()
