"""HTTP/1.1 as uvicorn and h11 speak it, with refusals of unreadable requests in the words of every other error."""

import asyncio
import json
import sys
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.lingering import LingeringTransport

HEAD_TOO_LARGE = 431
CLIENT_IDLE_S = 30.0
"""How long a client may take for a request's line and headers, and then between any two pieces of the body."""


class Http(H11Protocol):
    """A request that is no HTTP, or whose head is larger than the bound, ends its connection with a JSON body.

    That answer, and any other that comes before the request was read, reaches a client that is still sending. A
    connection on which no application is at work is closed when nothing comes to its end on it.
    """

    _connection: LingeringTransport
    _idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._connection = LingeringTransport(transport, self._client_is_sending)
        super().connection_made(self._connection)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._connection.lingering:
            self._connection.discard(data)
            return
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._connection.end()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Called by uvicorn when the server stops: only an application at work is waited for."""
        if not self._connection.lingering:
            super().shutdown()
        if not self._at_work():
            self._connection.end()

    def _at_work(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _client_is_sending(self) -> bool:
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR) or self._holds_bytes()

    def _holds_bytes(self) -> bool:
        return bool(self.conn.trailing_data[0])

    def _watch(self) -> None:
        """Bound the time for a head, and for the rest of a body whose request was answered without it.

        uvicorn's own timer, for a connection between two requests, ends with the first byte that comes.
        """
        if self._at_work() or (self.conn.their_state is h11.IDLE and not self._holds_bytes()):
            self._stop_watching()
        idle = self._idle_timer is None and self.timeout_keep_alive_task is None
        if idle and not self._at_work() and not self.transport.is_closing():
            self._idle_timer = self.loop.call_later(CLIENT_IDLE_S, self._is_late)

    def _stop_watching(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _is_late(self) -> None:
        if self.conn.their_state is h11.IDLE and self._holds_bytes():
            self._refuse(client_too_slow("its request line and headers were not complete"))
        else:  # an answer to nothing would be taken for that to the next request
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn while it handles h11's error, which knows the status that fits."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == HEAD_TOO_LARGE:
            refusal = head_too_large("its request line and headers are larger than this server takes")
        else:
            refusal = ApiError(status, f"This is no request in HTTP/1.1: {error}.", code="http_error")
        self._refuse(refusal)

    def _refuse(self, refusal: ApiError) -> None:
        """Answer what has no application to answer it, and close."""
        body = json.dumps(refusal.body()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        response = h11.Response(status_code=refusal.status, headers=headers)
        try:
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # an answer has begun already; cut it off unless it is whole
            if self._at_work():
                self._connection.end()
        self.transport.close()
        if self._at_work():  # the connection may linger, but what the application does is for nobody
            self.cycle.disconnected = True
            self.cycle.message_event.set()


def client_too_slow(reason: str) -> ApiError:
    """The refusal of a request that does not come to its end."""
    return ApiError(
        408,
        f"The request was given up: {reason} {CLIENT_IDLE_S:g} seconds later.",
        code="request_timeout",
        headers={"connection": "close"},
    )


def head_too_large(reason: str) -> ApiError:
    """The refusal of a request with too much before its body."""
    return ApiError(
        HEAD_TOO_LARGE,
        f"The request was not read: {reason}.",
        code="headers_too_large",
        headers={"connection": "close"},
    )
