"""The routes of the Messages API: /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from agent_runtime.gateway.answer import Answer
from agent_runtime.gateway.anthropic.decode import Decoded, decode
from agent_runtime.gateway.anthropic.errors import error_response, translated
from agent_runtime.gateway.anthropic.stream import MessagesWire
from agent_runtime.gateway.body import read_json_object
from agent_runtime.gateway.errors import CLIENT_CLOSED_REQUEST, ApiError
from agent_runtime.gateway.job import Asked, Gateway, prepare, prompt_tokens, refusals
from agent_runtime.gateway.owner import owner_of
from k3_sglang.chat.request_fields import shown

PREFIX = "/v1/messages"
VERSION_HEADER = "anthropic-version"
VERSIONS = ("2023-06-01", "2026-10-21")
"""The later one only takes fields away; those that K3 has a use for are read under both."""
SESSION_HEADER = "x-claude-code-session-id"

_Json = dict[str, Any]


class MessagesRoutes:
    """The endpoints. ``anthropic-beta`` is not read: what its flags allow is accepted or refused where it is asked."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        """For the application."""
        return [
            Route(PREFIX, self._messages, methods=["POST"]),
            Route(f"{PREFIX}/count_tokens", self._count_tokens, methods=["POST"]),
        ]

    async def _messages(self, request: Request) -> ASGIApp:
        return await self._served(request, self._answer, counting=False)

    async def _count_tokens(self, request: Request) -> ASGIApp:
        return await self._served(request, self._count, counting=True)

    async def _served(
        self, request: Request, serve: Callable[[Asked, Decoded], Awaitable[ASGIApp]], *, counting: bool
    ) -> ASGIApp:
        try:
            _check_version(request.headers)
            body, raw = await read_json_object(request, self._gateway.settings.max_body_bytes)
            with refusals():
                decoded = decode(body, counting=counting)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except ApiError as error:
            return error_response(translated(error))
        try:
            named = _named(decoded.body, request.headers)
            return await serve(Asked(named, raw, request.headers, "messages", owner_of(request)), decoded)
        except ApiError as error:
            return error_response(translated(error, decoded.places.translated))

    async def _answer(self, asked: Asked, decoded: Decoded) -> ASGIApp:
        job = await prepare(asked, self._gateway)
        return Answer(self._gateway, job, MessagesWire(job.facts, decoded))

    async def _count(self, asked: Asked, decoded: Decoded) -> ASGIApp:
        return JSONResponse({"input_tokens": await prompt_tokens(asked, self._gateway)})


def _named(body: _Json, headers: Mapping[str, str]) -> _Json:
    """The body with the session that Claude Code names in a header, if the body names none."""
    session = headers.get(SESSION_HEADER)
    if not session or "metadata" in body:
        return body
    return {**body, "metadata": {"session_id": session}}


def _check_version(headers: Mapping[str, str]) -> None:
    version = headers.get(VERSION_HEADER)
    if version is not None and version not in VERSIONS:
        raise ApiError(
            400, f"{VERSION_HEADER}: got {shown(version)}; allowed: {', '.join(VERSIONS)}", code="unsupported_value"
        )
