"""To whom the inspector is served, under which names, with or without content; nothing can be changed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.settings import GatewaySettings
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.conftest import NO_ENGINE, Running
from tests.gateway.serving import serving
from tests.gateway.stub_engine import StubEngine
from tests.inspector.conftest import converse
from tests.inspector.pages import page, session_path, step_paths


async def test_content_can_be_withheld(
    caching_stub: StubEngine, settings: dict[str, Any], tokenizer: K3Tokenizer, engine_url: str
) -> None:
    app = create_app(GatewaySettings(**settings, inspector_content=False), SGLangEngine(engine_url), tokenizer)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        running = Running(app, url, client)
        await converse(running, 2, text="a secret")
        for path in await step_paths(running):
            markup = await page(running, path)
            assert "secret" not in markup
            assert "I think" not in markup
            assert "inspector_content is false" in markup


@pytest.mark.parametrize(
    ("given", "served"),
    [
        ({}, True), ({"host": "localhost"}, True), ({"host": "::1"}, True), ({"host": "0.0.0.0"}, False),
        ({"host": "example.org"}, False), ({"host": "0.0.0.0", "inspector": "on"}, True), ({"inspector": "off"}, False),
    ],
)  # fmt: skip
async def test_by_itself_it_is_served_on_loopback_only(
    settings: dict[str, Any], tokenizer: K3Tokenizer, given: dict[str, Any], served: bool
) -> None:
    is_open = given.get("host") in ("0.0.0.0", "example.org")
    app = create_app(GatewaySettings(**settings, **given, allow_no_keys=is_open), SGLangEngine(NO_ENGINE), tokenizer)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(base_url="http://localhost:8000", transport=transport) as client:
        assert (await client.get("/inspector")).status_code == (200 if served else 404)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200), ("localhost", 200), ("[::1]:8000", 200), ("LOCALHOST:80", 200),
        ("evil.example", 403), ("127.0.0.1.evil.example:8000", 403), ("", 403),
    ],
)  # fmt: skip
async def test_a_name_that_was_made_to_lead_here_is_refused(
    settings: dict[str, Any], tokenizer: K3Tokenizer, host: str, status: int
) -> None:
    app = create_app(GatewaySettings(**settings), SGLangEngine(NO_ENGINE), tokenizer)
    async with httpx.AsyncClient(base_url="http://localhost", transport=httpx.ASGITransport(app)) as client:
        assert (await client.get("/inspector", headers={"host": host})).status_code == status


async def test_nothing_can_be_changed(inspected: Running) -> None:
    for path in ("/inspector", "/inspector/checkpoints", await session_path(inspected)):
        assert (await inspected.client.post(path)).status_code == 405
        assert (await inspected.client.delete(path)).status_code == 405
