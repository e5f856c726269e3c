"""HTTP/1.1 as uvicorn and h11 speak it, with refusals of unreadable requests in the words of every other error."""

import json
import sys
from contextlib import suppress

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from agent_runtime.gateway.errors import ApiError

HEAD_TOO_LARGE = 431


class Http(H11Protocol):
    """A request that is no HTTP, or whose head is larger than the bound, ends its connection with a JSON body."""

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn while it handles h11's error, which knows the status that fits."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == HEAD_TOO_LARGE:
            refusal = head_too_large("its request line and headers are larger than this server takes")
        else:
            refusal = ApiError(status, f"This is no request in HTTP/1.1: {error}.", code="http_error")
        body = json.dumps(refusal.body()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        with suppress(h11.LocalProtocolError):  # an answer has begun already: all that is left is to close
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def head_too_large(reason: str) -> ApiError:
    """The refusal of a request with too much before its body."""
    return ApiError(
        HEAD_TOO_LARGE,
        f"The request was not read: {reason}.",
        code="headers_too_large",
        headers={"connection": "close"},
    )
