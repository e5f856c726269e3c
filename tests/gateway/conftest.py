"""Fixtures of the gateway tests: a vocabulary, a scripted engine, and the real gateway in front of it."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.http import Http
from agent_runtime.gateway.keys import ApiKeys
from agent_runtime.gateway.settings import GatewaySettings
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import MODEL
from tests.gateway.process import vocabulary_files, write
from tests.gateway.raw_http import Connection
from tests.gateway.serving import serving
from tests.gateway.stub_engine import Script, StubEngine, says
from tests.gateway.vocabulary import TurnWriter, byte_tokenizer

NO_ENGINE = "http://127.0.0.1:9"
"""The discard port: nothing listens there."""


@pytest.fixture(scope="session")
def tokenizer() -> K3Tokenizer:
    """One token per byte."""
    return byte_tokenizer()


@pytest.fixture(scope="session")
def writer(tokenizer: K3Tokenizer) -> TurnWriter:
    """Writes model output."""
    return TurnWriter(tokenizer)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Settings of the gateway under test; a test changes them before it asks for `gateway`."""
    return {"model": MODEL, "tokenizer_dir": tmp_path, "context_len": 100_000}


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    """A settings file with a vocabulary beside it, for port 0 and an engine nobody runs."""
    vocabulary_files(tmp_path)
    return write(tmp_path, {})


@pytest.fixture
def keys() -> ApiKeys | None:
    """Keys of the gateway under test; a module that is about keys overrides this."""
    return None


@pytest.fixture
async def stub(writer: TurnWriter, tokenizer: K3Tokenizer) -> StubEngine:
    """An engine that thinks "T" and answers "Hi"; a test replaces `plan`."""

    def plan(body: dict[str, Any]) -> Script:
        return says(writer.turn("T", "Hi"), end_of_msg=tokenizer.special.end_of_msg)

    return StubEngine(plan)


@dataclass
class Running:
    """A served gateway: its application, its URL and a client for it."""

    app: Starlette
    url: str
    client: httpx.AsyncClient

    async def ask(self, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        """POST a chat completion and return the JSON of the answer, which must have `status`."""
        response = await self.client.post("/v1/chat/completions", json=body)
        assert response.status_code == status, response.text
        return response.json()


@pytest.fixture
async def engine_url(stub: StubEngine) -> AsyncGenerator[str, None]:
    """URL of the scripted engine, served on loopback."""
    async with serving(stub.app()) as url:
        yield url


@pytest.fixture
async def offline(
    settings: dict[str, Any], tokenizer: K3Tokenizer, keys: ApiKeys | None
) -> AsyncGenerator[Running, None]:
    """The gateway called in process, with no engine: whatever is asked must be answered without one."""
    engine = SGLangEngine(NO_ENGINE)
    app = create_app(GatewaySettings(**settings), engine, tokenizer, keys=keys)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(base_url="http://gateway", transport=transport) as client:
        yield Running(app, "http://gateway", client)
    await engine.aclose()


@pytest.fixture
async def gateway(
    settings: dict[str, Any], tokenizer: K3Tokenizer, engine_url: str, keys: ApiKeys | None
) -> AsyncGenerator[Running, None]:
    """The gateway, served on loopback in front of the scripted engine."""
    app = create_app(GatewaySettings(**settings), SGLangEngine(engine_url), tokenizer, keys=keys)
    async with (
        serving(app, Http) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client,
    ):
        yield Running(app, url, client)


@pytest.fixture
async def client(gateway: Running) -> AsyncGenerator[AsyncOpenAI, None]:
    """The client as its users make it, without retries so that failures show."""
    http = httpx.AsyncClient(trust_env=False)
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, http_client=http) as made:
        yield made


@pytest.fixture
async def connection(gateway: Running) -> AsyncGenerator[Connection, None]:
    """A connection on which a test writes what it likes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    yield reader, writer
    writer.close()
