"""Routes that show and steer the engine's cache: release and abandon sessions, pin a beginning, see the tree."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, TypeVar

import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agent_runtime.errors import EngineError
from agent_runtime.gateway.body import read_json_object
from agent_runtime.gateway.cache_fields import SECONDS_OF_A_DAY, Session
from agent_runtime.gateway.errors import CLIENT_CLOSED_REQUEST, ApiError, from_engine
from agent_runtime.gateway.job import Asked, Gateway, history_ids, scope_of
from agent_runtime.gateway.owner import owner_of
from k3_sglang.chat.request import PROMPT_FIELDS

Seconds = Annotated[float, Field(ge=0, le=SECONDS_OF_A_DAY)]
Body = TypeVar("Body", bound=BaseModel)


class Release(BaseModel):
    """Body of ``POST /v1/k3/cache/release``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    session: str


class Abandon(BaseModel):
    """Body of ``POST /v1/k3/cache/abandon``."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    session: str
    start: Annotated[int, Field(ge=0, lt=2**53, alias="from")] = 0


class Pin(BaseModel):
    """Body of ``POST /v1/k3/cache/pin``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    seconds: Seconds
    ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)] | None = None


class CacheRoutes:
    """The handlers. Each forwards to the engine, which carries it out on every rank, and answers with their results.

    All may be repeated: what is gone already is not an error.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        """For the application."""
        return [
            Route("/v1/k3/cache", self._answered(self.show), methods=["GET"]),
            Route("/v1/k3/cache/release", self._answered(self.release), methods=["POST"]),
            Route("/v1/k3/cache/abandon", self._answered(self.abandon), methods=["POST"]),
            Route("/v1/k3/cache/pin", self._answered(self.pin), methods=["POST"]),
            Route("/v1/k3/sessions/{id:path}", self._answered(self.end_session), methods=["DELETE"]),
        ]

    async def show(self, request: Request) -> dict[str, Any]:
        """GET /v1/k3/cache: counters and the tree of every rank; ``?tree=0`` leaves the tree out.

        Where keys have several owners the tree, which is all of theirs, is left out always.
        """
        unknown = sorted(set(request.query_params) - {"tree"})
        is_shared = len(self._gateway.owners) > 1
        tree = request.query_params.get("tree", "0" if is_shared else "1")
        if unknown or tree not in ("0", "1"):
            raise ApiError(
                400,
                f"The query is {request.url.query[:80]!r}; allowed is tree=0 or tree=1.",
                code="invalid_value",
                param=unknown[0][:80] if unknown else "tree",
            )
        if tree == "1" and is_shared:
            raise ApiError(
                403,
                "The tree holds the sessions of every API key's owner, so no one owner is shown it; tree=0 has the "
                "counters.",
                code="tree_not_shown",
                param="tree",
            )
        return {"object": "k3.cache", "ranks": await self._ask("dump" if tree == "1" else "metrics")}

    async def release(self, request: Request) -> dict[str, Any]:
        """POST /v1/k3/cache/release: nothing of a session will be asked again."""
        return await self._release(_validated(Release, await self._body(request)).session, owner_of(request))

    async def end_session(self, request: Request) -> dict[str, Any]:
        """DELETE /v1/k3/sessions/{id}: the same."""
        return await self._release(request.path_params["id"], owner_of(request))

    async def abandon(self, request: Request) -> dict[str, Any]:
        """POST /v1/k3/cache/abandon: what a session has behind a position is unlikely to be asked again."""
        asked = _validated(Abandon, await self._body(request))
        session = _session(asked.session, owner_of(request))
        self._gateway.record.abandoned(scope_of(session, session.owner), asked.start)
        ranks = await self._ask("abandon", {"session": session.engine_name, "from": asked.start})
        if self._gateway.instruments is not None:
            self._gateway.instruments.compressions.inc()
        return {"object": "k3.cache.abandon", "session": session.id, "from": asked.start, "ranks": ranks}

    async def pin(self, request: Request) -> dict[str, Any]:
        """POST /v1/k3/cache/pin: keep the deepest checkpoint of a beginning for some seconds; 0 ends the pin."""
        body = await self._body(request)
        chat = {key: body.pop(key) for key in PROMPT_FIELDS if key in body}
        asked = _validated(Pin, body)
        if (asked.ids is None) != bool(chat):
            raise ApiError(
                400,
                "A pin names its beginning either by ids or by messages (and tools, reasoning_effort, ... as in a "
                "completion), not by both.",
                code="invalid_value",
                param="ids" if chat else "messages",
            )
        ids = asked.ids
        if ids is None:
            named = Asked(chat, b"", request.headers, owner=owner_of(request))
            ids = await anyio.to_thread.run_sync(partial(history_ids, named, self._gateway))
        ranks = await self._ask("pin", {"ids": ids, "seconds": asked.seconds, "now_s": time.time()})
        return {"object": "k3.cache.pin", "prompt_tokens": len(ids), "ranks": ranks}

    async def _release(self, id_: str, owner: str) -> dict[str, Any]:
        session = _session(id_, owner)
        ranks = await self._ask("release", {"session": session.engine_name})
        return {"object": "k3.cache.release", "session": session.id, "ranks": ranks}

    async def _ask(self, command: str, body: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        if not self._gateway.cache.active:
            raise ApiError(
                409,
                "The engine is not known to run the checkpoint cache (cache: k3), which these routes are about.",
                code="cache_unavailable",
            )
        try:
            return await self._gateway.engine.cache_command(command, body)
        except EngineError as error:
            raise from_engine(error) from error

    async def _body(self, request: Request) -> dict[str, Any]:
        return (await read_json_object(request, self._gateway.settings.max_body_bytes))[0]

    @staticmethod
    def _answered(
        handler: Callable[[Request], Awaitable[dict[str, Any]]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            try:
                return JSONResponse(await handler(request))
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)

        return answered


def _session(text: str, owner: str) -> Session:
    try:
        return Session.from_id(text, owner)
    except ValueError as error:
        raise ApiError(400, f"session={text[:80]!r}: {error}.", code="invalid_value", param="session") from error


def _validated(model: type[Body], body: dict[str, Any]) -> Body:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))[:80]
        allowed = ", ".join(name.alias or key for key, name in model.model_fields.items())
        raise ApiError(
            400,
            f"{field}: {first['msg']}, got {repr(first['input'])[:80]}. Fields: {allowed}.",
            code="unsupported_field" if first["type"] == "extra_forbidden" else "invalid_value",
            param=field,
        ) from error
