"""Every way a request can fail has OpenAI's error shape, a status that fits, and words that help."""

import json
import socket
from typing import Any

import httpx
import pytest

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.settings import GatewaySettings
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import chat, chat_with_tool, streamed
from tests.gateway.conftest import Running
from tests.gateway.serving import serving
from tests.gateway.stub_engine import Script, StubEngine
from tests.gateway.vocabulary import TurnWriter


async def refused(gateway: Running, body: Any, status: int = 400) -> dict[str, Any]:
    """The error object of a request that must fail with `status`."""
    answer = await gateway.ask(body, status)
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return answer["error"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"256": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"seed": 5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"stream_options": {"unknown": 1}, "stream": True}, "stream_options"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
    ],
)
async def test_a_wrong_value_is_refused_with_the_name_of_its_field(
    offline: Running, fields: dict[str, Any], param: str
) -> None:
    error = await refused(offline, {**chat(), **fields})
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0] == param


async def test_unknown_fields_are_refused_all_by_name_with_what_is_accepted(offline: Running) -> None:
    error = await refused(offline, chat(best_of=2, functions=[]))
    assert error["code"] == "unsupported_field"
    assert "'best_of'" in error["message"] and "'functions' (" in error["message"]
    assert "max_completion_tokens" in error["message"] and "messages" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 4, "max_completion_tokens": 5},
        {"stream_options": {"include_usage": True}},
        {"top_k": 0},
    ],
)
async def test_fields_that_contradict_each_other_are_refused(offline: Running, fields: dict[str, Any]) -> None:
    assert (await refused(offline, chat(**fields)))["code"] == "invalid_value"


async def test_an_unknown_model_is_a_404_that_names_the_served_one(offline: Running) -> None:
    error = await refused(offline, chat(model="gpt-4"), 404)
    assert error["code"] == "model_not_found" and "'kimi-k3'" in error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"model": NaN}',
        b'{"a": ' * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"model": "\\ud800"}',
    ],
    ids=["empty", "cut", "list", "not utf-8", "nan", "deep", "long number", "surrogate"],
)
async def test_a_body_that_is_not_usable_json_is_a_400(offline: Running, raw: bytes) -> None:
    response = await offline.client.post("/v1/chat/completions", content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


async def test_an_astral_character_written_as_a_surrogate_pair_is_accepted(gateway: Running, stub: StubEngine) -> None:
    raw = json.dumps(chat("🙂"), ensure_ascii=True).encode()
    assert b"\\ud83d" in raw
    response = await gateway.client.post("/v1/chat/completions", content=raw)
    assert response.status_code == 200
    assert bytes(token for token in stub.requests[0]["input_ids"] if token < 256).count("🙂".encode()) == 1


async def test_other_paths_and_methods_have_the_same_error_shape(offline: Running) -> None:
    missing = await offline.client.get("/v2/anything")
    assert missing.status_code == 404 and "/v1/chat/completions" in missing.json()["error"]["message"]
    wrong = await offline.client.get("/v1/chat/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["type"] == "invalid_request_error"


class TestSmallLimits:
    """A gateway with a small window and a small body limit."""

    @pytest.fixture
    def settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {**settings, "context_len": 700, "max_body_bytes": 2000, "max_output_tokens": 50}

    async def test_a_prompt_that_does_not_fit_is_refused_with_the_sizes(
        self, gateway: Running, stub: StubEngine
    ) -> None:
        error = await refused(gateway, chat("x" * 700))
        assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
        assert "700" in error["message"]
        assert stub.requests == []

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [({}, 50), ({"max_tokens": 7}, 7), ({"max_completion_tokens": 1_048_576}, None)],
    )
    async def test_the_output_budget_is_clamped_to_the_rest_of_the_window(
        self, gateway: Running, stub: StubEngine, fields: dict[str, Any], expected: int | None
    ) -> None:
        await gateway.ask(chat(**fields))
        (request,) = stub.requests
        room = 700 - len(request["input_ids"])
        assert request["sampling_params"]["max_new_tokens"] == (room if expected is None else expected)

    async def test_a_body_over_the_limit_is_a_413_announced_or_not(self, gateway: Running) -> None:
        big = json.dumps(chat("x" * 3000)).encode()

        async def unannounced():
            yield big[:1500]
            yield big[1500:]

        for content in (big, unannounced()):
            response = await gateway.client.post("/v1/chat/completions", content=content)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (Script([], None, status=400, error={"error": {"message": "too long"}}), 400, "engine_rejected"),
        (Script([], None, status=422, error={"detail": "bad field"}), 400, "engine_rejected"),
        (Script([], None, error={"message": "no room", "code": 400}), 400, "engine_rejected"),
        (Script([], None, status=503, error={"message": "busy"}), 503, "engine_unavailable"),
        (Script([], None, status=404, error="gone"), 502, "engine_failed"),
        (
            Script([], {"type": "abort", "message": "too large for the pool", "status_code": 400}),
            400,
            "engine_rejected",
        ),
        (Script([], {"type": "abort", "message": "aborted by an operator"}), 502, "engine_failed"),
        (Script([ConnectionError("died")], None), 503, "engine_unavailable"),
        (Script([[999]], None), 502, "engine_failed"),
        (Script([], {"type": "magic"}), 502, "engine_failed"),
    ],
)
async def test_a_failure_before_the_first_token_is_a_plain_error_streamed_or_not(
    gateway: Running, stub: StubEngine, script: Script, status: int, code: str, stream: bool
) -> None:
    stub.plan = lambda body: script
    body = streamed(chat()) if stream else chat()
    assert (await refused(gateway, body, status))["code"] == code


async def test_a_refusal_of_the_engine_is_passed_on_in_its_words(gateway: Running, stub: StubEngine) -> None:
    stub.plan = lambda body: Script([], None, status=400, error={"error": {"message": "pool has 12 tokens"}})
    assert "pool has 12 tokens" in (await refused(gateway, chat()))["message"]


async def test_a_failure_in_mid_stream_is_an_error_event(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda body: Script([writer.text("thinking"), ConnectionError("died")], None)
    response = await gateway.client.post("/v1/chat/completions", json=streamed(chat()))
    assert response.status_code == 200
    *_, error, done = [line for line in response.text.split("\n\n") if line]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    assert done == "data: [DONE]"


async def test_one_failing_choice_fails_the_completion_and_aborts_the_others(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    def plan(body: dict[str, Any]) -> Script:
        if len(stub.requests) == 2:
            return Script([], None, status=503, error={"message": "busy"})
        return Script([writer.text("thinking")], None)

    stub.plan = plan
    await refused(gateway, chat(n=3), 503)
    await stub.until(lambda engine: len(engine.aborts) == 2 and not engine.running)


async def test_without_an_engine_requests_are_503_and_health_says_so(
    settings: dict[str, Any], tokenizer: K3Tokenizer
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    app = create_app(GatewaySettings(**settings), SGLangEngine(url), tokenizer)
    async with serving(app) as base, httpx.AsyncClient(base_url=base, trust_env=False) as client:
        response = await client.post("/v1/chat/completions", json=chat())
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "engine_unavailable"
        health = await client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "engine_unavailable"})


async def test_health_and_models_describe_the_server(gateway: Running, stub: StubEngine) -> None:
    assert (await gateway.client.get("/health")).json() == {"status": "ok"}
    stub.ready = False
    assert (await gateway.client.get("/health?deep=1")).status_code == 503
    listing = (await gateway.client.get("/v1/models")).json()
    (model,) = listing["data"]
    assert model["id"] == "kimi-k3" and model["context_length"] == model["max_model_len"] == 100_000
    assert (await gateway.client.get("/v1/models/kimi-k3")).json() == model
    missing = await gateway.client.get("/v1/models/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


async def test_arguments_that_cannot_be_rendered_name_the_message(offline: Running) -> None:
    body = chat_with_tool()
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": "[1]"}}
    fine = {"role": "assistant", "content": "x"}
    body["messages"] += [fine, {"role": "user", "content": "y"}, {"role": "assistant", "tool_calls": [call]}]
    error = await refused(offline, body)
    assert error["param"].startswith("messages[3].tool_calls[0]")
