"""What the inspector knows over time: while a request runs, after a restart, of what was forgotten or compressed."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.inspector.log import StepLog
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.agent.scripted_endpoint import Reply, usage
from tests.gateway.bodies import chat, continued, user
from tests.gateway.conftest import Running
from tests.gateway.serving import serving
from tests.gateway.stub_engine import Script, StubEngine
from tests.gateway.vocabulary import TurnWriter
from tests.inspector.conftest import HOSTILE, converse
from tests.inspector.pages import page, session_path, step_paths, text_of
from tests.upstream.conftest import scripted


async def test_a_restarted_gateway_shows_what_its_ledger_has(
    caching_stub: StubEngine, settings: dict[str, Any], tokenizer: K3Tokenizer, engine_url: str, tmp_path: Path
) -> None:
    settings = {**settings, "ledger": str(tmp_path / "ledger.db")}

    async def once(ask: bool) -> list[str]:
        app = create_app(GatewaySettings(**settings), SGLangEngine(engine_url), tokenizer)
        async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
            running = Running(app, url, client)
            if ask:
                body = await converse(running, 2, name="kept")
                stripped = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in body["messages"]]
                await running.ask({**body, "messages": stripped})
                told = {"session": "prompt_cache_key:kept", "from": 77}
                assert (await client.post("/v1/k3/cache/abandon", json=told)).status_code == 200
                await running.ask({**body, "messages": [*stripped, {"role": "user", "content": "and now"}]})
            paths = [await session_path(running), *await step_paths(running)]
            return [_without_total(await page(running, path)) for path in paths]

    before, after = await once(ask=True), await once(ask=False)
    # Also what the client sent is there, and the prompt, which is no longer in memory, comes from the file.
    assert after == before
    assert "The message as it was sent" in after[2]
    assert "compressed: the client has left what lay behind token 77" in after[0]
    assert re.search(r"first token [\d.]+ m?s", after[0])
    assert "I think." in after[2]


def _without_total(markup: str) -> str:
    """A turn is on record a moment before its step is over."""
    markup = re.sub(r"(total )[\d.]+ m?s", r"\1", markup)
    markup = re.sub(
        r'(<td class="number">[^<]*</td>)<td class="number">[^<]*</td>(<td><span class="chip)', r"\1\2", markup
    )
    return re.sub(r"(<dt>total</dt><dd>)[^<]*", r"\1", markup)


async def test_a_compression_that_the_client_tells_of_is_marked_at_the_next_step(inspected: Running) -> None:
    told = {"session": "prompt_cache_key:the session", "from": 1234}
    assert (await inspected.client.post("/v1/k3/cache/abandon", json=told)).status_code == 200
    await converse(inspected, 2, name="the session")
    markup = await page(inspected, await session_path(inspected))
    rows = markup.split("Steps in the order")[2].split("<tr>")[-2:]
    assert "compressed: the client has left what lay behind token 1,234" in rows[0]
    assert "compressed" not in rows[1]


async def test_what_the_ledger_forgets_is_gone_here_too(inspected: Running) -> None:
    log: StepLog = inspected.app.state.record.log
    (session,) = log.sessions(0, 10)
    log.forget_sessions([session.id])
    await page(inspected, f"/inspector/sessions/{session.id}", 404)
    assert len(log) == 0


async def test_before_another_server_a_turn_is_shown_as_its_text() -> None:
    turn = Reply([{"reasoning_content": "I think."}, {"content": HOSTILE}], "stop", usage(100, 10, 50))
    async with scripted(turn, turn, profile="generic") as (_, client):
        url = str(client.base_url)
        answer = await client.post("/v1/chat/completions", json=chat())
        again = continued(chat(), answer.json(), user("go on"))
        assert (await client.post("/v1/chat/completions", json=again)).status_code == 200
        running = Running(Starlette(), url, client)
        assert "50.0 %" in text_of(await page(running, "/inspector"))
        text = text_of(await page(running, (await step_paths(running))[0]))
    assert "gave no token ids" in text
    assert "I think." in text
    assert "</pre><script>" in text
    assert "sent it back as messages[1]: exact" in text


async def test_a_turn_that_came_back_in_another_protocol_is_shown_as_it_was_sent(
    caching_stub: StubEngine, settings: dict[str, Any], tokenizer: K3Tokenizer, engine_url: str, tmp_path: Path
) -> None:
    settings = {**settings, "ledger": str(tmp_path / "ledger.db")}
    app = create_app(GatewaySettings(**settings), SGLangEngine(engine_url), tokenizer)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        running = Running(app, url, client)
        body: dict[str, Any] = {"model": "kimi-k3", "max_tokens": 500, "messages": [user("Hello")]}
        body["metadata"] = {"user_id": "someone"}
        answer = (await client.post("/v1/messages", json=body)).json()
        spoken = [block for block in answer["content"] if block["type"] == "text"]
        body["messages"] += [{"role": "assistant", "content": spoken}, user("go on")]
        assert (await client.post("/v1/messages", json=body)).status_code == 200
        text = text_of(await page(running, (await step_paths(running))[0]))
    assert "messages" in text.split("protocol")[1].split()[0]
    assert re.search(r"sent it back as messages\[1\]: repaired", text)
    assert "I say." in text.split("The message as it was sent")[1]


async def test_the_oldest_steps_go_first(inspected: Running) -> None:
    log = StepLog(3)
    for step in inspected.app.state.record.log.sessions(0, 1)[0].steps:
        log.add(replace(step))
    (session,) = log.sessions(0, 10)
    assert len(session.steps) == len(log) == 3


async def test_a_request_is_shown_while_it_waits_while_it_runs_and_when_it_has_failed(
    caching_stub: StubEngine, gateway: Running, writer: TurnWriter
) -> None:
    begin, end = asyncio.Event(), asyncio.Event()
    ids = writer.turn("I think.", "I say.")
    stop = {"type": "stop", "matched": 258}
    caching_stub.plan = lambda _: Script([begin.wait, ids[:4], end.wait, ids[4:]], stop, cached_tokens=40)
    asked = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=chat()))
    await caching_stub.until(lambda stub: bool(stub.running))
    waiting = await page(gateway, await session_path(gateway))
    assert "running" in waiting
    assert 'class="pending"' in waiting
    begin.set()
    log: StepLog = gateway.app.state.record.log
    while not (step := log.sessions(0, 1)[0].steps[0]).is_computed:
        await asyncio.sleep(0.01)
    assert (step.cached_tokens, step.pending_tokens, step.running) == (40, 0, True)
    end.set()
    await asked
    assert not step.running
    assert step.total_ms is not None
    caching_stub.plan = lambda _: Script([], None, status=500, error={"error": "broken"})
    await gateway.ask(chat(), status=503)
    assert "it failed, or the client left" in await page(gateway, await session_path(gateway))
