"""Every failure in the envelope of the protocol that its client speaks."""

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Scope

from agent_runtime.gateway.anthropic.errors import error_response
from agent_runtime.gateway.anthropic.routes import PREFIX as MESSAGES
from agent_runtime.gateway.anthropic.routes import VERSION_HEADER
from agent_runtime.gateway.errors import ApiError


def in_shape(scope: Scope, error: ApiError) -> JSONResponse:
    """The error as the client's protocol has it: Anthropic's below its paths and for its clients, else OpenAI's."""
    path = scope["path"]
    is_messages = path.startswith(f"{MESSAGES}/") or path == MESSAGES
    return error_response(error) if is_messages or VERSION_HEADER in Headers(scope=scope) else error.response()
