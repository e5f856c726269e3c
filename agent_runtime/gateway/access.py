"""Who may ask: every request but a look at the health shows a key, and what follows knows whose it is."""

import logging

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.http import head_too_large
from agent_runtime.gateway.keys import ApiKeys
from agent_runtime.gateway.owner import OWNER
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.gateway.shape import in_shape

logger = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/ready")
"""Answered without a key, as long as they have no query: `/health?deep=1` makes the engine work."""

_POLICY_VIOLATION = 1008


class Access:
    """ASGI middleware in front of everything. Without keys everybody is let in, and all are one owner."""

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, settings: GatewaySettings) -> None:
        self._app = app
        self._keys = keys
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through or answer it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        if scope["type"] == "http":
            reason = self._too_large(scope)
            if reason is not None:
                await in_shape(scope, head_too_large(reason))(scope, receive, send)
                return
            is_open = scope["path"] in OPEN_PATHS and not scope["query_string"]
            if self._keys is not None and not is_open:
                headers = Headers(scope=scope)
                owner = self._owner(self._keys, headers)
                if owner is None:
                    logger.warning("%s %.200r was asked without a valid key", scope["method"], scope["path"])
                    await in_shape(scope, _refusal(headers))(scope, receive, send)
                    return
                scope[OWNER] = owner
        await self._app(scope, receive, send)

    def _too_large(self, scope: Scope) -> str | None:
        """What is too large about the head of a request; h11 sees only heads that come in several pieces."""
        count, max_headers = len(scope["headers"]), self._settings.max_headers
        if count > max_headers:
            return f"it has {count} headers, at most {max_headers} may be"
        size = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope.get("raw_path") or b"")
        size += len(scope["query_string"])
        if size > self._settings.max_header_bytes:
            return f"its path and headers have {size} bytes, at most {self._settings.max_header_bytes} may be"
        return None

    @staticmethod
    def _owner(keys: ApiKeys, headers: Headers) -> str | None:
        """Whose key the request shows: as a bearer token, or else as Anthropic's clients do."""
        bearer = _bearer(headers)
        owner = keys.owner(bearer) if bearer is not None else None
        key = headers.get("x-api-key")
        return keys.owner(key) if owner is None and key is not None else owner


def _bearer(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _refusal(headers: Headers) -> ApiError:
    shown = "authorization" in headers or "x-api-key" in headers
    message = "The API key is not valid here." if shown else "This server needs an API key."
    return ApiError(
        401,
        f"{message} Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
        code="invalid_api_key",
        # The body is not read, so the connection cannot be used again.
        headers={"www-authenticate": "Bearer", "connection": "close"},
    )
