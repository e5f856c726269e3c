"""OpenAI-shaped error bodies: every failure a client can see goes through ``ApiError``."""

from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from agent_runtime.errors import EngineError, EngineRejected, EngineTimeout, EngineUnavailable

CLIENT_CLOSED_REQUEST = 499
"""Nobody reads it; it is what logs of other servers call a client that left."""

ERROR_WORD = "k3.error"
"""Key of a request's scope: the word of the failure that it was answered with."""

RETRY_AFTER_S = 1
"""What a 503 or 429 suggests: the engine may be restarting or full, or this gateway ending with another beside it; all
pass quickly or not at all."""


class ApiError(Exception):
    """A failure with the status and the words the client gets.

    ``param`` is the request field at fault, ``code`` a stable word for programs, ``type`` OpenAI's class of error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        type: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.type = type
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON body: the four keys of OpenAI's envelope, null where there is nothing to say."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def word(self) -> str:
        """Its code, or its status where it has none; for counting."""
        return self.code or f"status_{self.status}"

    def response(self) -> JSONResponse:
        """The whole answer."""
        return ErrorResponse(self, self.body(), self.status, self.headers)


class ErrorResponse(JSONResponse):
    """The answer to a failure. It leaves the failure's word in the request's scope, for whoever counts."""

    def __init__(self, error: ApiError, body: dict[str, Any], status: int, headers: dict[str, str] | None) -> None:
        super().__init__(body, status_code=status, headers=headers)
        self._word = error.word

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ERROR_WORD] = self._word
        await super().__call__(scope, receive, send)


class PromptTooLong(ApiError):
    """The prompt leaves no room for an answer; all counts are tokens."""

    def __init__(self, prompt_tokens: int, context_len: int) -> None:
        super().__init__(
            400,
            f"This model's context length is {context_len} tokens and the prompt has {prompt_tokens}, "
            f"{1 + prompt_tokens - context_len} more than fit beside one output token. Shorten or compact the "
            "messages.",
            code="context_length_exceeded",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.context_len = context_len


def from_engine(error: EngineError) -> ApiError:
    """What a client is told about a failure of the engine."""
    if isinstance(error, EngineRejected):
        return ApiError(400, f"The engine refused the request: {error.message}", code="engine_rejected")
    if isinstance(error, EngineTimeout):
        return ApiError(504, f"Engine timeout: {error.message}", code="engine_timeout", type="server_error")
    if isinstance(error, EngineUnavailable):
        return ApiError(
            503,
            f"The engine is not available: {error.message}",
            code="engine_unavailable",
            type="server_error",
            headers={"retry-after": str(RETRY_AFTER_S)},
        )
    return ApiError(502, f"The engine failed: {error.message}", code="engine_failed", type="server_error")


def internal_error() -> ApiError:
    """A failure nobody foresaw; its details go to the log, not to the client."""
    return ApiError(500, "The gateway failed on this request; its log has the details.", type="server_error")
