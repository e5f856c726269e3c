"""Which routes take a slot of which kind, and the route that shows what an owner has running."""

from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agent_runtime.gateway.admission import admitted
from agent_runtime.gateway.operations.drain import Drain
from agent_runtime.gateway.owner import owner_of
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.gateway.slots import Slots

GENERATING = frozenset(("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"))
"""Make the engine work."""
COUNTING = frozenset(("/v1/messages/count_tokens", "/v1/tokenize", "/v1/detokenize", "/v1/k3/cache/pin"))
"""Compute here only; with slots of their own, so that an agent may count while its answers run."""

_SHOWN = ("max_body_bytes", "max_messages", "max_tools", "max_images", "max_choices", "max_headers", "max_header_bytes")


class Limits:
    """The slots of both kinds."""

    def __init__(self, settings: GatewaySettings, drain: Drain) -> None:
        self._settings = settings
        self._drain = drain
        self._generating = Slots(settings)
        self._counting = Slots(settings)

    def applied(self, routes: Iterable[Route]) -> list[Route]:
        """The routes, those that compute behind slots."""
        return [self._behind_slots(route) for route in routes]

    def routes(self) -> list[Route]:
        """For the application."""
        return [Route("/v1/k3/limits", self.show, methods=["GET"])]

    async def show(self, request: Request) -> Response:
        """GET /v1/k3/limits: what the owner of the key has running and waiting, and what one request may have."""
        owner = owner_of(request)
        return JSONResponse(
            {
                "object": "k3.limits",
                "owner": owner,
                "generating": self._generating.state(owner),
                "counting": self._counting.state(owner),
                "request": {name: getattr(self._settings, name) for name in _SHOWN},
            }
        )

    def _behind_slots(self, route: Route) -> Route:
        if "POST" not in (route.methods or ()):
            return route
        if route.path in GENERATING:
            return admitted(route, self._generating, self._drain)
        return admitted(route, self._counting, self._drain) if route.path in COUNTING else route
