"""One agent script on our gateway, on SGLang's own endpoint, and on our gateway before that endpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from agent_runtime.engine.openai_chat import ChatClient, ChatSettings
from agent_runtime.limits import Limits, Retries
from agent_runtime.loop import Agent
from agent_runtime.replay import replay
from agent_runtime.tools.registry import ToolRegistry, tool
from tests.agent.scripted_endpoint import says
from tests.engine.stack import Engine, Stack
from tests.gateway.bodies import MODEL, user
from tests.upstream.conftest import ask, before, scripted

OUTPUT_TOKENS = 40


@tool
async def look(where: str) -> str:
    """Looks.

    Args:
        where: Where.
    """
    return f"nothing at {where}"


def served_model(url: str) -> str:
    """The name SGLang serves the model under."""
    return httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]


async def script(url: str) -> list[int | None]:
    """Two tasks in one session; prompt tokens of every step."""
    async with ChatClient(f"{url}/v1", settings=ChatSettings(None, OUTPUT_TOKENS)) as client:
        agent = Agent(
            client, ToolRegistry([look]), "You look after a garden.", limits=Limits(2, retries=Retries(unusable=0))
        )
        runs = [await agent.run("Water the beds."), await agent.run("Go on.")]
    assert all(request.exact for request in replay(agent.history.store.entries()))
    return [step.prompt_tokens for run in runs for step in run.steps]


@pytest.mark.parametrize("way", ["our gateway", "SGLang", "our gateway before SGLang"])
async def test_the_same_agent_script_runs_on_every_endpoint(
    stack: Stack, engine: Engine, way: Literal["our gateway", "SGLang", "our gateway before SGLang"]
) -> None:
    if way == "our gateway before SGLang":
        async with before(f"{stack.engine_url}/v1", "sglang", upstream_model=served_model(stack.engine_url)) as client:
            tokens = await script(str(client.base_url))
            counts = (await client.get("/v1/k3/replay")).json()
        assert {verdict for verdict, count in counts["turns"].items() if count} == {"exact"}
        assert counts["prompts_extended"] == counts["requests"]["exact"] >= 1
    else:
        tokens = await script(stack.gateway_url if way == "our gateway" else stack.engine_url)
    assert len(tokens) >= 2 and None not in tokens
    assert tokens == sorted(tokens, key=lambda count: count or 0) and len(set(tokens)) == len(tokens)


async def test_thinking_that_a_client_drops_reaches_sglang_all_the_same(
    stack: Stack, engine: Engine, tmp_path: Path
) -> None:
    # Without a reasoning parser SGLang answers in content only, so the turn with thinking comes from another server.
    model, ledger = served_model(stack.engine_url), tmp_path / "ledger.db"
    first: dict[str, Any] = {"model": MODEL, "messages": [user("Water the beds.")], "max_tokens": 8, "temperature": 0}
    async with scripted(says("Done.", "First the roses. " * 9), profile="sglang", ledger=ledger) as (_, client):
        message = (await ask(client, first))["choices"][0]["message"]
    kept = {**first, "messages": [*first["messages"], message, user("Go on.")]}
    dropped = copy.deepcopy(kept)
    del dropped["messages"][1]["reasoning_content"]
    engine_v1 = f"{stack.engine_url}/v1"
    async with before(engine_v1, "sglang", upstream_model=model, ledger=ledger) as client:
        told = [await ask(client, body) for body in (kept, dropped)]
    async with before(engine_v1, "sglang", upstream_model=model, guard="off") as client:
        lost = await ask(client, dropped)
    tokens = [answer["usage"]["prompt_tokens"] for answer in (*told, lost)]
    assert [answer["headers"]["x-k3-replay"].partition(";")[0] for answer in told] == ["exact", "repaired"]
    assert tokens[0] == tokens[1] > tokens[2] + 9, "SGLang has read the thinking, and misses it without the guard"
