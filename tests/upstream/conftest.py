"""Fixtures: the real gateway, served on loopback, in front of a scripted chat endpoint."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.foreign import ForeignServer
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.upstream.profiles import PROFILES
from tests.agent.scripted_endpoint import Endpoint, Reply, serve
from tests.gateway.bodies import MODEL
from tests.gateway.serving import serving

NAMES = sorted(PROFILES)


def settings_for(url: str, profile: str = "generic", **more: Any) -> GatewaySettings:
    """Settings of a gateway in front of an endpoint."""
    base = {"model": MODEL, "context_len": 100_000, "upstream": "openai", "upstream_url": url}
    return GatewaySettings(**{**base, "upstream_profile": profile, **more})


@asynccontextmanager
async def before(url: str, profile: str = "generic", **more: Any) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client of a running gateway before an endpoint."""
    settings = settings_for(url, profile, **more)
    foreign = ForeignServer(settings)
    app = create_app(settings, foreign.engine(), None, foreign)
    async with (
        serving(app) as gateway,
        httpx.AsyncClient(base_url=gateway, trust_env=False, timeout=30) as client,
    ):
        yield client


@asynccontextmanager
async def scripted(
    *script: Reply, profile: str = "generic", **more: Any
) -> AsyncGenerator[tuple[Endpoint, httpx.AsyncClient], None]:
    """A scripted endpoint and a client of the gateway before it."""
    with serve(*script) as endpoint:
        async with before(endpoint.base_url, profile, **more) as client:
            yield endpoint, client


async def ask(client: httpx.AsyncClient, body: dict[str, Any], status: int = 200, **headers: str) -> dict[str, Any]:
    """POST a chat completion; its answer, which must have ``status``. Headers are named with underscores."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await client.post("/v1/chat/completions", json=body, headers=named)
    assert response.status_code == status, response.text
    return {**response.json(), "headers": response.headers}


@pytest.fixture(params=NAMES)
def profile(request: pytest.FixtureRequest) -> str:
    """Each kind of server."""
    return request.param


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Where a gateway keeps its ledger."""
    return tmp_path / "ledger.db"
