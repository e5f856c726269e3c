"""The whole path: an OpenAI client, the gateway, the engine and the tiny model, without anything scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agent_runtime.ledger.reading import LedgerReader
from tests.engine.stack import Engine, Stack
from tests.gateway.bodies import WEATHER_TOOL, chat, continued, tool_results, user

MODEL = "tiny"
MAX_TOKENS = 400
"""More than the longest turn the forced grammar allows."""


@pytest.fixture
def gateway(stack: Stack, engine: Engine) -> Iterator[httpx.Client]:
    """The session's gateway, over an engine with an empty prefix cache."""
    with httpx.Client(base_url=stack.gateway_url, timeout=120, trust_env=False) as client:
        yield client


@pytest.fixture
def client(stack: Stack, engine: Engine) -> Iterator[openai.OpenAI]:
    """The openai package pointed at the gateway."""
    with openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def ask(gateway: httpx.Client, **body: Any) -> dict[str, Any]:
    """A greedy completion that must succeed."""
    request = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS, **body}
    response = gateway.post("/v1/chat/completions", json=request)
    assert response.status_code == httpx.codes.OK, response.text
    return response.json()


def test_a_completion_has_reasoning_content_and_exact_usage(gateway: httpx.Client) -> None:
    answer = ask(gateway, messages=[{"role": "user", "content": "hello"}])
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert isinstance(choice["message"]["reasoning_content"], str)
    assert isinstance(choice["message"]["content"], str)
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_required_tool_is_called_with_schema_valid_arguments_streamed_and_not(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "weather?"}],
        "tools": [WEATHER_TOOL],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    whole = client.chat.completions.create(**request).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls
    call = whole.message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    properties = WEATHER_TOOL["function"]["parameters"]["properties"]
    assert call.function.name == WEATHER_TOOL["function"]["name"]
    assert set(arguments) <= set(properties)

    pieces, names, finish = [], [], None
    for chunk in client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for delta in choice.delta.tool_calls or []:
                assert delta.function is not None
                names += [delta.function.name] if delta.function.name else []
                pieces.append(delta.function.arguments or "")
    assert finish == "tool_calls"
    assert names == [call.function.name]
    assert json.loads("".join(pieces)) == arguments


def test_a_session_replays_exactly_and_its_cached_tokens_grow(gateway: httpx.Client) -> None:
    body = chat(model=MODEL, tools=[WEATHER_TOOL], temperature=0, max_tokens=MAX_TOKENS)
    cached, prompts = [], []
    for _ in range(5):
        response = gateway.post("/v1/chat/completions", json=body)
        assert response.status_code == httpx.codes.OK, response.text
        answer = response.json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        prompts.append(answer["usage"]["prompt_tokens"])
        called = "tool_calls" in answer["choices"][0]["message"]
        body = continued(body, answer, *(tool_results(answer, "sunny") if called else [user("And tomorrow?")]))
        if len(cached) > 1:
            assert response.headers["x-k3-replay"].startswith("exact")
    assert cached[0] == 0
    assert cached == sorted(cached)
    assert cached[1] > 0
    assert all(later > earlier for earlier, later in zip(prompts, prompts[1:], strict=False))
    assert cached[-1] > prompts[0]


def test_a_client_that_drops_all_thinking_extends_every_prompt_all_the_same(
    gateway: httpx.Client, ledger_file: Path
) -> None:
    body = chat(model=MODEL, tools=[WEATHER_TOOL], temperature=1, max_tokens=MAX_TOKENS, prompt_cache_key="dropper")
    cached = []
    for turn in range(8):
        answer = ask(gateway, **body)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        replay = answer["k3"]["replay"]
        assert replay["verdict"] in (("repaired", "exact") if turn else ("new",))
        assert replay.get("prefix") == ({"holds": True} if turn else None)
        called = "tool_calls" in answer["choices"][0]["message"]
        body = continued(body, answer, *(tool_results(answer, "sunny") if called else [user("And tomorrow?")]))
        del body["messages"][-2]["reasoning_content"]
    assert cached == sorted(cached)
    with LedgerReader(ledger_file) as reader:
        (session,) = [session.id for session in reader.sessions() if session.name == "prompt_cache_key:dropper"]
        outputs = {record.step: record.ids for record in reader.turns(session)}
        prompts = [(step.id, reader.prompt_ids(step.id)) for step in reader.steps(session)]
    assert len(prompts) == 8
    for (step, before), (_, after) in zip(prompts, prompts[1:], strict=False):
        whole = before + outputs[step]
        assert after[: len(whole)] == whole


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.5, "top_k": 20, "min_p": 0.01},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"temperature": 1.0, "logit_bias": {"65": 5, "66": -100}},
        {"n": 3, "temperature": 1.0},
        {"stop": ["e"]},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "low"},
        {"response_format": {"type": "json_object"}},
    ],
    ids=lambda options: "+".join(options),
)
def test_an_accepted_option_reaches_the_engine_and_gets_an_answer(
    gateway: httpx.Client, options: dict[str, Any]
) -> None:
    answer = ask(gateway, messages=[{"role": "user", "content": "go"}], **options)
    assert len(answer["choices"]) == options.get("n", 1)
    assert all(choice["finish_reason"] == "stop" for choice in answer["choices"])
    if "response_format" in options:
        json.loads(answer["choices"][0]["message"]["content"])


def test_a_prompt_beyond_the_window_is_refused_with_sizes(gateway: httpx.Client) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 40_000}]}
    response = gateway.post("/v1/chat/completions", json=body)
    assert response.status_code == httpx.codes.BAD_REQUEST
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "32768" in error["message"]


def test_a_client_that_leaves_mid_stream_frees_the_engine(gateway: httpx.Client, engine: Engine) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "go"}], "stream": True, "max_tokens": MAX_TOKENS}
    for _ in range(5):
        with gateway.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_lines())
    engine.wait_idle()
