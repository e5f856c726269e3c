"""What can go wrong with another server, in the words and with the status that a client gets."""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from agent_runtime.errors import AgentRuntimeError

MAX_WORDS_CHARS = 500
_OVERFLOW = re.compile(r"context[ _]length|maximum context|model token limit|longer than the model", re.I)
_TOO_MANY = 429
_GATEWAY_KEY = (401, 402, 403)
_ABOUT_THE_REQUEST = (400, 409, 413, 415, 422)
_TIMEOUTS = (408, 504)
_UNAVAILABLE = 503


class UpstreamError(AgentRuntimeError):
    """A request to the other server failed. ``status``, ``code`` and ``param`` are for the client.

    ``retry_after`` is the value of the server's own header.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after


def unreachable(reason: str) -> UpstreamError:
    """No connection, or it was lost before an answer began."""
    return UpstreamError(503, "upstream_unavailable", f"The upstream is not available: {reason}", retry_after="1")


def silent(seconds: float) -> UpstreamError:
    """It sent nothing for too long."""
    return UpstreamError(504, "upstream_timeout", f"The upstream sent nothing for {seconds:g} s.")


def broken(reason: str) -> UpstreamError:
    """An answer began and did not come to its end."""
    return UpstreamError(502, "upstream_stream_broken", f"The upstream's answer broke off: {reason}")


def not_understood(reason: str) -> UpstreamError:
    """The answer does not follow the API."""
    return UpstreamError(502, "upstream_failed", f"The upstream's answer cannot be understood: {reason}")


def refused(status: int, body: bytes, headers: Mapping[str, str]) -> UpstreamError:
    """What an answer other than 200 means to the client: only what is about its request keeps its status."""
    words, code, param = _said(body)
    retry_after = headers.get("retry-after")
    told = f"{status}: {words}"
    if status in _GATEWAY_KEY:
        message = f"The upstream does not accept the gateway's key ({told})"
        return UpstreamError(502, "upstream_unauthorized", message)
    if status == _TOO_MANY:
        message = f"The upstream allows no more requests now ({told})"
        return UpstreamError(429, "upstream_rate_limited", message, retry_after=retry_after)
    if status in _ABOUT_THE_REQUEST:
        overflows = code == "context_length_exceeded" or _OVERFLOW.search(words) is not None
        message = f"The upstream refused the request ({told})"
        kind = "context_length_exceeded" if overflows else "upstream_rejected"
        return UpstreamError(400, kind, message, param="messages" if overflows else param)
    if status in _TIMEOUTS:
        return UpstreamError(504, "upstream_timeout", f"The upstream took too long ({told})")
    if status == _UNAVAILABLE:
        return UpstreamError(
            503, "upstream_unavailable", f"The upstream is not available ({told})", retry_after=retry_after or "1"
        )
    return UpstreamError(502, "upstream_failed", f"The upstream failed ({told})", retry_after=retry_after)


def from_event(error: Any) -> UpstreamError:
    """An error that arrived inside a stream."""
    words, code, _ = _said(json.dumps({"error": error}).encode())
    return UpstreamError(502, "upstream_failed", f"The upstream failed in mid-stream ({code or 'no code'}: {words})")


def _said(body: bytes) -> tuple[str, str | None, str | None]:
    """Words, code and field of an error body: OpenAI's envelope, the flat one of some servers, or text."""
    try:
        value: Any = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")[:MAX_WORDS_CHARS] or "(empty body)", None, None
    for key in ("error", "detail"):
        if isinstance(value, dict) and key in value:
            value = cast("dict[str, Any]", value)[key]
    if not isinstance(value, dict):
        return str(value)[:MAX_WORDS_CHARS], None, None
    fields = cast("dict[str, Any]", value)
    words = fields.get("message", fields)
    code, param = fields.get("code"), fields.get("param")
    return (
        str(words)[:MAX_WORDS_CHARS],
        code if isinstance(code, str) else None,
        param if isinstance(param, str) else None,
    )
