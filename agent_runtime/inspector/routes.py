"""The inspector's routes, all below one prefix, all GET: nothing can be changed here."""

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agent_runtime.inspector.content import Contents
from agent_runtime.inspector.html import Html, page_bytes
from agent_runtime.inspector.layout import HEADERS, PREFIX, Crumb, Site, not_found, notice, page
from agent_runtime.inspector.log import StepLog
from agent_runtime.inspector.sessions_page import session_page, sessions_page
from agent_runtime.inspector.step_page import Returned, StepView, step_page
from agent_runtime.inspector.tree_page import no_tree_page, tree_page
from k3_sglang.chat.tokenizer import K3Tokenizer

TREE_MAX_AGE_S = 2.0
"""A dump holds up the engine's scheduler for a moment: so many viewers still make one in this time."""

_STATIC_DIR = Path(__file__).parent / "static"
_STATIC_TYPES = {
    "inspector.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "inspector.js": "text/javascript; charset=utf-8",
}


class NoTree(Exception):
    """There is no checkpoint tree to be had; the message says why."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """What the pages are made from.

    ``contents`` is None when content may not be shown. ``read_tree`` asks the engine for its dump, one for each
    waiting queue, and raises NoTree. With ``is_own_host`` the host that a request names must pass it: a page of
    another site whose name was made to lead to this machine could otherwise read what is shown here.
    """

    site: Site
    log: StepLog
    contents: Contents | None
    tokenizer: K3Tokenizer | None
    read_tree: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]
    is_own_host: Callable[[str], bool] | None = None


class _BadQuery(ValueError):
    """A query that is not understood; the message says what is allowed."""


def inspector_routes(inspected: Inspected) -> list[Route]:
    """All routes of the inspector."""
    handlers = _Pages(inspected)
    pages: dict[str, Callable[[Request], Awaitable[Response]]] = {
        PREFIX: handlers.sessions,
        f"{PREFIX}/sessions/{{number}}": handlers.session,
        f"{PREFIX}/steps/{{number}}": handlers.step,
        f"{PREFIX}/checkpoints": handlers.checkpoints,
        f"{PREFIX}/static/{{name}}": handlers.static,
        f"{PREFIX}/{{rest:path}}": handlers.nothing,
    }
    return [
        Route(path, handlers.guarded(handler), methods=["GET"], include_in_schema=False)  # pages for people
        for path, handler in pages.items()
    ]


class _Pages:
    """The handlers. Pages are made on a thread, so that a large one holds up no stream."""

    def __init__(self, inspected: Inspected) -> None:
        self._all = inspected
        self._start = secrets.token_hex(4)
        self._tree: tuple[float, Sequence[Mapping[str, Any]]] | None = None
        self._tree_lock = anyio.Lock()

    def guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """A handler behind the look at the host, with queries that are not understood as a page."""

        async def answered(request: Request) -> Response:
            host = request.headers.get("host", "")
            if self._all.is_own_host is not None and not self._all.is_own_host(_host_name(host)):
                text = (
                    f"The request names the host {host!r}; here it must be localhost or a loopback address. "
                    "Set inspector: on to serve it under other names."
                )
                return self._page(page(self._all.site, [Crumb("Refused")], notice(text, kind="wrong")), 403)
            try:
                return await handler(request)
            except _BadQuery as error:
                return self._page(page(self._all.site, [Crumb("Refused")], notice(str(error), kind="wrong")), 400)

        return answered

    async def sessions(self, request: Request) -> Response:
        """GET /inspector."""
        number = _whole(request, {"page": 1}).get("page", 1)
        return await self._live(request, partial(sessions_page, self._all.site, self._all.log, number))

    async def session(self, request: Request) -> Response:
        """GET /inspector/sessions/{number}."""
        asked = _whole(request, {"page": 1})
        number = request.path_params["number"]
        found = self._all.log.session(int(number)) if _is_number(number) else None
        if found is None:
            return self._missing(f"There is no session {number[:40]!r} among the latest steps.")
        return await self._live(request, partial(session_page, self._all.site, found, asked.get("page")))

    async def step(self, request: Request) -> Response:
        """GET /inspector/steps/{number}."""
        asked = _whole(request, {"from": 0, "whole": 0})
        number = request.path_params["number"]
        step = self._all.log.step(int(number)) if _is_number(number) else None
        session = self._all.log.session(step.session) if step is not None else None
        if step is None or session is None:
            return self._missing(f"There is no step {number[:40]!r} among the latest ones.")
        contents = self._all.contents

        def make() -> Html:
            following = self._all.log.following(step)
            returned = [Returned(one, contents.came_back(one) if contents is not None else None) for one in following]
            content = contents.of(step) if contents is not None else None
            view = StepView(step, session, content, returned, self._all.tokenizer)
            return step_page(self._all.site, view, asked.get("from"), asked.get("whole"))

        return self._page(await anyio.to_thread.run_sync(make))

    async def checkpoints(self, request: Request) -> Response:
        """GET /inspector/checkpoints."""
        rank = _whole(request, {"rank": 0}).get("rank", 0)
        try:
            ranks = await self._ranks()
        except NoTree as error:
            return self._page(no_tree_page(self._all.site, str(error)))
        if rank >= len(ranks):
            raise _BadQuery(f"rank={rank}: the engine has ranks 0 to {len(ranks) - 1}.")
        return self._page(await anyio.to_thread.run_sync(partial(tree_page, self._all.site, ranks, rank)))

    async def static(self, request: Request) -> Response:
        """GET /inspector/static/{name}."""
        name = request.path_params["name"]
        if name not in _STATIC_TYPES:
            return self._missing(f"There is no file {name[:40]!r}.")
        data = await anyio.to_thread.run_sync((_STATIC_DIR / name).read_bytes)
        return Response(data, headers=HEADERS, media_type=_STATIC_TYPES[name])

    async def nothing(self, request: Request) -> Response:
        """Any other path below the prefix."""
        if not request.path_params["rest"]:
            return await self.sessions(request)
        return self._missing(f"There is no {request.url.path[:80]!r} here.")

    async def _ranks(self) -> Sequence[Mapping[str, Any]]:
        async with self._tree_lock:
            if self._tree is None or time.monotonic() - self._tree[0] > TREE_MAX_AGE_S:
                found = await self._all.read_tree()
                self._tree = (time.monotonic(), found)
            return self._tree[1]

    async def _live(self, request: Request, make: Callable[[], Html]) -> Response:
        """A page that is the same as long as no step has changed."""
        tag = f'"{self._start}-{self._all.log.version}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={**HEADERS, "etag": tag})
        return self._page(await anyio.to_thread.run_sync(make), tag=tag)

    def _page(self, made: Html, status: int = 200, tag: str | None = None) -> Response:
        headers = HEADERS if tag is None else {**HEADERS, "etag": tag}
        return Response(page_bytes(made), status, headers=headers, media_type="text/html; charset=utf-8")

    def _missing(self, what: str) -> Response:
        site = self._all.site
        remedy = f"The latest {site.max_steps:,} requests are known here (inspector_steps)."
        if site.has_ledger:
            remedy += " Older ones are in the ledger: python -m agent_runtime.ledger."
        return self._page(not_found(site, what, remedy), 404)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _host_name(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header.partition("]")[0].strip("[]")
    return header.rpartition(":")[0] if ":" in header else header


def _whole(request: Request, lowest: Mapping[str, int]) -> dict[str, int]:
    """The query as whole numbers, each from its lowest value on."""
    found: dict[str, int] = {}
    for key, value in request.query_params.multi_items():
        if key not in lowest:
            allowed = ", ".join(lowest) or "none"
            raise _BadQuery(f"The query has {key[:40]!r}; known here: {allowed}.")
        if not _is_number(value) or int(value) < lowest[key]:
            raise _BadQuery(f"{key}={value[:40]!r}; allowed is a whole number from {lowest[key]} on.")
        found[key] = int(value)
    return found
