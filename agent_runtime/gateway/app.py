"""The gateway's Starlette application: routes, and one shape for every error."""

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from agent_runtime.engine.types import Engine
from agent_runtime.gateway.access import Access
from agent_runtime.gateway.answer import Answer
from agent_runtime.gateway.anthropic.models import model_list, model_object
from agent_runtime.gateway.anthropic.routes import VERSION_HEADER, MessagesRoutes
from agent_runtime.gateway.body import read_json_object
from agent_runtime.gateway.cache_link import CacheLink
from agent_runtime.gateway.cache_routes import CacheRoutes
from agent_runtime.gateway.errors import CLIENT_CLOSED_REQUEST, ApiError, internal_error
from agent_runtime.gateway.foreign import ForeignServer
from agent_runtime.gateway.images import ImageInput
from agent_runtime.gateway.inspection import inspector
from agent_runtime.gateway.job import Asked, Gateway, keep_up, prepare
from agent_runtime.gateway.key_file import KeyFile
from agent_runtime.gateway.keys import ApiKeys
from agent_runtime.gateway.limits import Limits
from agent_runtime.gateway.openapi.document import document
from agent_runtime.gateway.operations.drain import Drain
from agent_runtime.gateway.operations.instruments import make_instruments
from agent_runtime.gateway.operations.scrape import ScrapeRoute
from agent_runtime.gateway.operations.traffic import Traffic
from agent_runtime.gateway.owner import NO_OWNER, owner_of
from agent_runtime.gateway.record import Record
from agent_runtime.gateway.responses.routes import ResponseRoutes
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.gateway.shape import in_shape
from agent_runtime.gateway.text_routes import TextRoutes
from agent_runtime.gateway.wire import ChatWire
from agent_runtime.guard.prompt import HistoryGuard
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.tokenizer import K3Tokenizer

logger = logging.getLogger(__name__)


class _Endpoints:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = int(time.time())

    async def chat_completions(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        try:
            body, raw = await read_json_object(request, self._gateway.settings.max_body_bytes)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        asked = Asked(body, raw, request.headers, owner=owner_of(request))
        job = await prepare(asked, self._gateway)
        return Answer(self._gateway, job, ChatWire(job.facts, include_usage=job.options.include_usage))

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the model and its aliases, as the client's API has them."""
        settings = self._gateway.settings
        names = (settings.model, *settings.model_aliases)
        if VERSION_HEADER in request.headers:
            return JSONResponse(model_list(names, settings, self._started))
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        settings = self._gateway.settings
        name = request.path_params["name"]
        if name not in (settings.model, *settings.model_aliases):
            raise ApiError(404, f"The model {name!r} is not served here.", code="model_not_found", param="model")
        if VERSION_HEADER in request.headers:
            return JSONResponse(model_object(name, settings, self._started))
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        settings = self._gateway.settings
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "k3_sglang",
            "root": settings.model,
            # Both spellings in use: hosted APIs say context_length, open servers max_model_len.
            "context_length": settings.context_len,
            "max_model_len": settings.context_len,
            "max_output_tokens": min(settings.max_output_tokens, settings.context_len),
        }

    async def replay(self, request: Request) -> Response:
        """GET /v1/k3/replay: what was found about the owner's histories since the start."""
        guard = self._gateway.record.guard(owner_of(request))
        known = {"known_turns": len(guard.index), "known_tokens": guard.index.tokens}
        return JSONResponse({**guard.counters.snapshot(), **known})

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json: all of this, for programs."""
        return JSONResponse(document())

    async def health(self, request: Request) -> Response:
        """GET /health: whether the engine answers; with ``?deep=1`` whether it generates."""
        deep = request.query_params.get("deep", "0") not in ("0", "false", "")
        healthy = await self._gateway.engine.healthy(deep=deep)
        status = "ok" if healthy else "engine_unavailable"
        return JSONResponse({"status": status}, status_code=200 if healthy else 503)

    async def ready(self, request: Request) -> Response:
        """GET /ready: whether requests can be answered now; the process itself is alive when anything answers."""
        if self._gateway.drain.begun:
            return JSONResponse({"status": "draining"}, status_code=503)
        healthy = await self._gateway.engine.healthy()
        status = "ready" if healthy else "engine_unavailable"
        return JSONResponse({"status": status}, status_code=200 if healthy else 503)


def create_app(
    settings: GatewaySettings,
    engine: Engine,
    tokenizer: K3Tokenizer | None,
    foreign: ForeignServer | None = None,
    keys: ApiKeys | None = None,
) -> Starlette:
    """The application; before another server ``foreign`` speaks to it, and ``engine`` stands for it.

    Whoever has one of ``keys`` may use it, everybody without them.

    It owns ``engine`` from here on and closes it when the server shuts down.

    Raises SettingsError when the settings about images cannot be used, LedgerError when the ledger cannot.
    """
    gateway = _gateway(settings, engine, tokenizer, foreign, keys)
    responses = ResponseRoutes(gateway)
    routes = _routes(gateway, responses)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        async with responses.background.serving(), anyio.create_task_group() as tasks:
            await gateway.cache.first_ask()
            tasks.start_soon(gateway.cache.keep_asking)
            tasks.start_soon(keep_up, gateway)
            if keys is not None and settings.api_keys_file is not None:
                tasks.start_soon(KeyFile(settings.api_keys_file, keys).keep_reading)
            yield
            tasks.cancel_scope.cancel()
        await gateway.images.aclose()
        await engine.aclose()
        gateway.record.close()

    traffic = Middleware(Traffic, routes=routes, drain=gateway.drain, instruments=gateway.instruments, refuse=in_shape)
    app = Starlette(
        routes=routes,
        middleware=[traffic, Middleware(Access, keys=keys, settings=settings)],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _unforeseen_error},
        lifespan=lifespan,
    )
    app.state.record = gateway.record
    app.state.drain = gateway.drain
    app.state.cache = gateway.cache
    return app


def _gateway(
    settings: GatewaySettings,
    engine: Engine,
    tokenizer: K3Tokenizer | None,
    foreign: ForeignServer | None,
    keys: ApiKeys | None,
) -> Gateway:
    images = ImageInput(settings)
    owners = frozenset((NO_OWNER,)) if keys is None else keys.owners
    record = Record(settings, HistoryGuard if foreign is None else foreign.make_guard, owners, tokenizer)
    encoded, cache = EncodeCache(settings.encoded_tokens), CacheLink(engine)
    drain, instruments = Drain(), make_instruments()
    return Gateway(settings, engine, tokenizer, record, images, encoded, cache, drain, instruments, foreign, owners)


def _routes(gateway: Gateway, responses: ResponseRoutes) -> list[Route]:
    settings = gateway.settings
    endpoints, limits = _Endpoints(gateway), Limits(settings, gateway.drain)
    routes = [
        Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
        *MessagesRoutes(gateway).routes(),
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
        Route("/v1/k3/replay", endpoints.replay, methods=["GET"]),
        Route("/openapi.json", endpoints.openapi, methods=["GET"]),
        Route("/health", endpoints.health, methods=["GET"]),
        Route("/ready", endpoints.ready, methods=["GET"]),
        *responses.routes(),
        *TextRoutes(gateway).routes(),
        *(CacheRoutes(gateway).routes() if settings.cache_routes else ()),
        *limits.routes(),
        *inspector(gateway),
    ]
    if settings.metrics:
        scrape = ScrapeRoute(gateway.instruments, gateway.record, gateway.cache, gateway.drain)
        routes.append(Route("/metrics", scrape.show, methods=["GET"]))
    return limits.applied(routes)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return in_shape(request.scope, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}."
    if error.status_code == 404:
        message = (
            f"There is no {request.url.path} here; see /v1/chat/completions, /v1/responses, /v1/messages, /v1/models "
            "and /health."
        )
    headers = dict(error.headers) if error.headers else None
    return in_shape(request.scope, ApiError(error.status_code, message, code="http_error", headers=headers))


async def _unforeseen_error(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return in_shape(request.scope, internal_error())
