"""Anthropic's error envelope."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from starlette.responses import JSONResponse

from agent_runtime.gateway.errors import ApiError, ErrorResponse, PromptTooLong

OVERLOADED = 529
"""What this API answers where others answer 503; its clients wait and try again."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_STATUS = {503: OVERLOADED}


def status_of(error: ApiError) -> int:
    """The status this API has for a failure."""
    return _STATUS.get(error.status, error.status)


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """The envelope; ``k3.code`` is the stable word that other protocols have in theirs."""
    status = status_of(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": error.message}}
    if error.code is not None:
        body["k3"] = {"code": error.code, "param": error.param}
    return {**body, "request_id": request_id}


def new_request_id() -> str:
    """An id for an answer that has none yet."""
    return f"req_{uuid4().hex}"


def error_response(error: ApiError, request_id: str | None = None) -> JSONResponse:
    """The whole answer."""
    request_id = request_id or new_request_id()
    headers = {**(error.headers or {}), "request-id": request_id}
    return ErrorResponse(error, error_body(error, request_id), status_of(error), headers)


def translated(error: ApiError, words: Callable[[str], str] = str) -> ApiError:
    """The same failure with the client's own names for places and fields, by ``words``.

    A prompt without room is told in the words by which this API's clients know that they must compact.
    """
    message = words(error.message)
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.context_len - 1} maximum"
    elif error.code == "context_length_exceeded":  # another server's: it need not tell the sizes
        message = f"prompt is too long: {message}"
    param = words(error.param) if error.param is not None else None
    return ApiError(error.status, message, code=error.code, param=param, type=error.type, headers=error.headers)
