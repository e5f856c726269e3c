"""GET /metrics: what happened to requests is counted once, under labels that no client can add to."""

import asyncio
import sys
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.operations import scrape
from agent_runtime.gateway.operations.instruments import MAX_CODES, OTHER_CODE, Instruments
from agent_runtime.gateway.settings import GatewaySettings
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import MODEL, chat, continued, streamed
from tests.gateway.conftest import NO_ENGINE, Running
from tests.gateway.stub_engine import Script, StubEngine
from tests.gateway.vocabulary import TurnWriter

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scraped(client: httpx.AsyncClient) -> Samples:
    """Every sample by its name and labels."""
    answer = await client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """One sample; it must be there."""
    return samples[name, frozenset(labels.items())]


async def test_a_session_is_counted_by_protocol_route_status_tokens_and_verdict(gateway: Running) -> None:
    first = await gateway.ask(chat())
    await gateway.ask(continued(chat(), first, {"role": "user", "content": "More"}))
    message = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
    assert (await gateway.client.post("/v1/messages", json=message)).status_code == 200
    samples = await scraped(gateway.client)
    path = "/v1/chat/completions"
    assert value(samples, "k3_gateway_requests_total", protocol="chat", route=path, status="200") == 2
    assert value(samples, "k3_gateway_requests_total", protocol="messages", route="/v1/messages", status="200") == 1
    assert value(samples, "k3_gateway_completions_total", protocol="chat", outcome="done") == 2
    assert value(samples, "k3_gateway_finishes_total", protocol="chat", reason="stop") == 2
    assert value(samples, "k3_gateway_completions_running", protocol="chat") == 0
    assert value(samples, "k3_gateway_completions_waiting", protocol="chat") == 0
    assert value(samples, "k3_gateway_time_to_first_token_seconds_count", protocol="chat") == 2
    assert value(samples, "k3_gateway_completion_seconds_count", protocol="messages") == 1
    used = first["usage"]
    assert value(samples, "k3_gateway_output_tokens_total", protocol="chat") == 2 * used["completion_tokens"]
    reasoning = used["completion_tokens_details"]["reasoning_tokens"]
    assert value(samples, "k3_gateway_reasoning_tokens_total", protocol="chat") == 2 * reasoning
    assert value(samples, "k3_gateway_prompt_tokens_total", protocol="chat") > 2 * used["prompt_tokens"]
    assert value(samples, "k3_replay_requests_total", verdict="exact") == 1
    assert value(samples, "k3_replay_requests_total", verdict="new") == 2
    assert value(samples, "k3_replay_turns_total", verdict="exact") == 1
    assert value(samples, "k3_record_turns") == 3


async def test_errors_are_counted_once_by_code_before_and_within_a_stream(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    await gateway.ask(chat(n=99), status=400)
    await gateway.ask(chat(model="nobody"), status=404)
    bad = await gateway.client.post("/v1/messages", json={"model": MODEL, "max_tokens": "many", "messages": []})
    assert bad.status_code == 400
    assert (await gateway.client.get("/nowhere/secret")).status_code == 404
    stub.plan = lambda body: Script([], None, status=503, error={"error": {"message": "full"}})
    await gateway.ask(chat(), status=503)
    stub.plan = lambda body: Script([writer.text("thinking"), ConnectionError()], None)
    text = (await gateway.client.post("/v1/chat/completions", json=streamed(chat()))).text
    assert '"error"' in text
    samples = await scraped(gateway.client)
    assert value(samples, "k3_gateway_errors_total", protocol="chat", code="unsupported_value") == 1
    assert value(samples, "k3_gateway_errors_total", protocol="chat", code="model_not_found") == 1
    assert value(samples, "k3_gateway_errors_total", protocol="chat", code="engine_unavailable") == 2
    assert value(samples, "k3_gateway_errors_total", protocol="other", code="http_error") == 1
    assert sum(count for (name, labels), count in samples.items() if name == "k3_gateway_errors_total") == 6
    assert value(samples, "k3_gateway_requests_total", protocol="other", route="other", status="404") == 1
    assert value(samples, "k3_gateway_completions_total", protocol="chat", outcome="error") == 1
    assert value(samples, "k3_gateway_completions_total", protocol="chat", outcome="error_in_stream") == 1
    assert "secret" not in repr(samples)


async def test_what_runs_and_waits_is_seen_and_a_client_that_leaves_is_counted(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    go_on = asyncio.Event()
    stub.plan = lambda body: Script([go_on.wait, writer.text("thinking")], None)
    async with gateway.client.stream("POST", "/v1/chat/completions", json=streamed(chat())) as response:
        assert response.status_code == 200
        pass
    await stub.until(lambda engine: bool(engine.aborts))
    samples = await scraped(gateway.client)
    assert value(samples, "k3_gateway_completions_total", protocol="chat", outcome="client_left") == 1


async def test_a_fault_of_the_gateway_is_no_client_that_left(
    gateway: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(*asked: Any) -> Any:
        raise RuntimeError("a fault of the gateway")

    monkeypatch.setattr("agent_runtime.gateway.responses.wire.ResponsesWire.whole", breaks)
    body = {"model": MODEL, "input": "Hi"}
    assert (await gateway.client.post("/v1/responses", json=body)).status_code == 500
    made = (await gateway.client.post("/v1/responses", json={**body, "background": True})).json()
    while made["status"] == "in_progress":
        made = (await gateway.client.get(f"/v1/responses/{made['id']}")).json()
    assert made["status"] == "failed" and made["error"]["code"] == "server_error"
    samples = await scraped(gateway.client)
    assert value(samples, "k3_gateway_completions_total", protocol="responses", outcome="error") == 1
    assert value(samples, "k3_gateway_completions_total", protocol="responses", outcome="error_in_stream") == 1
    assert value(samples, "k3_gateway_completions_total", protocol="responses", outcome="client_left") == 0
    assert caplog.text.count("a fault of the gateway") >= 2


async def test_a_completion_waits_until_its_first_token(gateway: Running, stub: StubEngine, writer: TurnWriter) -> None:
    go_on = asyncio.Event()
    stub.plan = lambda body: Script([go_on.wait, writer.text("thinking")], None)
    asked = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=chat()))
    await stub.until(lambda engine: len(engine.running) == 1)
    samples = await scraped(gateway.client)
    assert value(samples, "k3_gateway_completions_running", protocol="chat") == 1
    assert value(samples, "k3_gateway_completions_waiting", protocol="chat") == 1
    go_on.set()
    while value(samples, "k3_gateway_completions_waiting", protocol="chat"):
        samples = await scraped(gateway.client)
    assert value(samples, "k3_gateway_completions_running", protocol="chat") == 1
    asked.cancel()


async def test_the_caches_counters_are_asked_at_most_once_a_second_and_survive_its_silence(
    gateway: Running, stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await scraped(gateway.client)
    assert value(before, "k3_cache_up") == 0
    assert stub.commands == [], "this engine has no such cache"
    stub.cache_metrics = {"made": 5, "evicted": {"tip": 2}}
    stub.cache_backend = "k3"
    link = gateway.app.state.cache
    assert await link.ask()
    monkeypatch.setattr(scrape, "CACHE_FRESH_S", 3600.0)
    for _ in range(3):
        samples = await scraped(gateway.client)
        assert value(samples, "k3_cache_up") == 1
        assert value(samples, "k3_cache_checkpoints_made_total", dp_rank="0") == 5
        assert value(samples, "k3_cache_checkpoints_evicted_total", dp_rank="0", role="tip") == 2
    assert stub.commands == [("metrics", None)]
    monkeypatch.setattr(scrape, "CACHE_FRESH_S", 0.0)
    stub.refusal = "no"
    samples = await scraped(gateway.client)
    assert value(samples, "k3_cache_up") == 0
    assert value(samples, "k3_cache_checkpoints_made_total", dp_rank="0") == 5


async def test_a_runtime_that_tells_of_a_compression_is_counted(gateway: Running, stub: StubEngine) -> None:
    stub.cache_backend = "k3"
    assert await gateway.app.state.cache.ask()
    await gateway.client.post("/v1/k3/cache/abandon", json={"session": "session:a", "from": 7})
    assert value(await scraped(gateway.client), "k3_gateway_compressions_reported_total") == 1


def test_codes_of_other_servers_cannot_add_series_without_end() -> None:
    instruments = Instruments()
    for number in range(10 * MAX_CODES):
        instruments.error("chat", f"code_{number}")
    instruments.error("chat", "spaces and\nlines")
    (family,) = (f for f in instruments.registry.collect() if f.name == "k3_gateway_errors")
    codes = {sample.labels["code"] for sample in family.samples if sample.name.endswith("_total")}
    assert len(codes) <= MAX_CODES + 1 and OTHER_CODE in codes


async def test_without_the_package_nothing_is_measured_and_the_route_says_what_to_install(
    settings: dict[str, Any], tokenizer: K3Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    engine = SGLangEngine(NO_ENGINE)
    transport = httpx.ASGITransport(create_app(GatewaySettings(**settings), engine, tokenizer))
    async with httpx.AsyncClient(base_url="http://gateway", transport=transport) as client:
        answer = await client.get("/metrics")
        assert answer.status_code == 501 and "pip install 'prometheus-client" in answer.json()["error"]["message"]
        assert (await client.post("/v1/chat/completions", json=chat(n=99))).status_code == 400
    await engine.aclose()


async def test_metrics_can_be_switched_off(settings: dict[str, Any], tokenizer: K3Tokenizer) -> None:
    engine = SGLangEngine(NO_ENGINE)
    transport = httpx.ASGITransport(create_app(GatewaySettings(**settings, metrics=False), engine, tokenizer))
    async with httpx.AsyncClient(base_url="http://gateway", transport=transport) as client:
        assert (await client.get("/metrics")).status_code == 404
    await engine.aclose()
