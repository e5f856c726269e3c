"""Two gateways of one ledger: a session goes on at either, with the turns that the other has generated."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.applications import Starlette

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.ledger.reading import LedgerReader
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import chat, continued
from tests.gateway.serving import serving
from tests.gateway.stub_engine import StubEngine


@pytest.fixture
async def pair(
    settings: dict[str, Any], tokenizer: K3Tokenizer, engine_url: str, tmp_path: Path
) -> AsyncGenerator[list[httpx.AsyncClient], None]:
    """Clients of two gateways."""
    shared = {**settings, "ledger": tmp_path / "ledger.db", "ledger_shared": True}
    async with AsyncExitStack() as stack:
        clients: list[httpx.AsyncClient] = []
        for _ in range(2):
            app: Starlette = create_app(GatewaySettings(**shared), SGLangEngine(engine_url), tokenizer)
            url = await stack.enter_async_context(serving(app))
            clients.append(await stack.enter_async_context(httpx.AsyncClient(base_url=url, trust_env=False)))
        yield clients


async def test_a_session_that_lost_its_thinking_goes_on_at_either_gateway_with_the_very_ids(
    pair: list[httpx.AsyncClient], stub: StubEngine, tmp_path: Path
) -> None:
    headers = {"x-k3-session": "s"}
    body = chat()
    for turn in range(6):
        answer = await pair[turn % 2].post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        if turn:
            before, now = (request["input_ids"] for request in stub.requests[-2:])
            assert now[: len(before)] == before
            found = answer.json()["k3"]["replay"]
            assert found["repaired"] == turn and found["missing"] == found["foreign"] == 0
        body = continued(body, answer.json(), {"role": "user", "content": f"More {turn}"})
        del body["messages"][-2]["reasoning_content"]
    with LedgerReader(tmp_path / "ledger.db") as reader:
        assert reader.check() == []
        (session,) = reader.sessions()
        assert (session.steps, session.turns) == (6, 6)


async def test_sessions_without_a_name_go_on_too(pair: list[httpx.AsyncClient]) -> None:
    body = chat()
    first = (await pair[0].post("/v1/chat/completions", json=body)).json()
    again = await pair[1].post("/v1/chat/completions", json=continued(body, first, {"role": "user", "content": "x"}))
    assert again.headers["x-k3-replay"].startswith("exact; exact=1")


def test_sharing_needs_a_ledger(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="ledger_shared is true and ledger is not set"):
        GatewaySettings(**settings, ledger_shared=True)
