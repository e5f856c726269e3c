"""When a server counts as ready: it answers, and engine processes have said that our code is what runs in them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast

import httpx

from k3_sglang.announce import LOADING, Announcement

POLL_S = 0.25
PROGRESS_EVERY_S = 15.0
REQUEST_TIMEOUT_S = 30.0
OUR_PACKAGE = "k3_sglang."


class NotReady(RuntimeError):
    """A server that answers but must not be used; the message says why and what to look at."""


@dataclass(frozen=True)
class EngineFacts:
    """What engine processes announced about themselves."""

    model: dict[str, Any]
    """``model_class``, ``architecture``, ``layers``, ``parameters``, ``dtype``, ``device``, ..."""
    pools: dict[str, Any]
    """``kv_tokens``, ``state_slots``, ``page_size`` and bytes of each."""
    scheduler_pids: tuple[int, ...]
    plugin_pids: tuple[int, ...]
    server: dict[str, Any] = field(default_factory=dict[str, Any])
    """SGLang's own ``/server_info``."""


async def wait_until_healthy(
    name: str, url: str, progress: Callable[[str], None], doing: Callable[[], str | None] = lambda: None
) -> None:
    """Poll ``url`` until it answers 200; cancelled from outside when that takes too long.

    Args:
        name: of the server, for the lines of progress.
        url: where it says that it is healthy.
        progress: gets a line every quarter of a minute.
        doing: what the server is at, when it has said so.
    """
    started = asyncio.get_running_loop().time()
    told = started
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(url)).status_code == HTTPStatus.OK:
                    return
            now = asyncio.get_running_loop().time()
            if now - told >= PROGRESS_EVERY_S:
                busy = doing()
                progress(f"waiting for the {name}, {now - started:.0f} s so far{f': {busy}' if busy else ''}")
                told = now
            await asyncio.sleep(POLL_S)


def loading_text(announcements: Sequence[Announcement]) -> str | None:
    """How far the slowest rank is with its weights; None before any has said so."""
    ranks = [announcement.details for announcement in announcements if announcement.kind == LOADING]
    slowest = min(ranks, key=lambda details: int(details["done"]), default=None)
    return None if slowest is None else str(slowest["text"])


async def server_info(engine_url: str) -> dict[str, Any]:
    """SGLang's resolved arguments and scheduler facts.

    Raises:
        NotReady: no usable answer.
    """
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
        try:
            response = await client.get(f"{engine_url}/server_info")
            body = response.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise NotReady(f"engine does not answer /server_info: {error!r}; see its log above") from error
    if not isinstance(body, dict):
        raise NotReady(
            f"engine's /server_info is a {type(body).__name__}, expected an object; check the SGLang version"
        )
    return cast("dict[str, Any]", body)


def engine_facts(
    announcements: Sequence[Announcement], *, own_model: bool, images: bool, device: str, own_cache: bool = False
) -> EngineFacts:
    """Judge the announcements.

    Args:
        own_model: the model class must come from this package.
        images: pictures must be served: a processor prepares them and the model has an encoder.
        device: ``cpu`` or ``cuda``; the model must be there.
        own_cache: the prefix cache must be this package's.

    Raises:
        NotReady: the plugin is silent, or another model class or device is in use.
    """
    by_kind: dict[str, list[Announcement]] = {}
    for announcement in announcements:
        by_kind.setdefault(announcement.kind, []).append(announcement)
    further = (*(("images",) if images else ()), *(("cache",) if own_cache else ()))
    for kind in ("plugin", "model", "pools", *further):
        if kind not in by_kind:
            raise NotReady(
                f"no engine process announced {kind!r}: the plugin did not run there; SGLang logs and skips a plugin "
                "that fails, so look for 'Failed to load plugin' or 'Failed to execute' in its log"
            )
    # Of pipeline stages only the first has an encoder.
    model = max(by_kind["model"], key=lambda announcement: int(announcement.details.get("image_parameters", 0))).details
    model_class = str(model.get("model_class"))
    if own_model and not model_class.startswith(OUR_PACKAGE):
        raise NotReady(f"engine serves {model_class}, expected a class of {OUR_PACKAGE[:-1]}; check model_impl")
    if bool(model.get("image_parameters")) != images:
        raise NotReady(
            f"engine loaded an image encoder of {model.get('image_parameters')} parameters, expected "
            f"{'one' if images else 'none'}; check model_impl and the flags of the engine mapping"
        )
    if not str(model.get("device")).startswith(device):
        raise NotReady(f"engine put the model on {model.get('device')!r}, expected {device!r}; check --device")
    return EngineFacts(
        model=model,
        pools=by_kind["pools"][0].details,
        scheduler_pids=tuple(announcement.pid for announcement in by_kind["model"]),
        plugin_pids=tuple(announcement.pid for announcement in by_kind["plugin"]),
    )
