"""Every accepted option arrives where it takes effect."""

import json
from typing import Any

import pytest

from tests.gateway.bodies import WEATHER_TOOL, chat, streamed
from tests.gateway.conftest import Running
from tests.gateway.stub_engine import StubEngine

END_OF_MSG = 258


async def params(gateway: Running, stub: StubEngine, **fields: Any) -> dict[str, Any]:
    """The sampling parameters that the engine gets for a request with these fields."""
    stub.requests.clear()
    await gateway.ask(chat(**fields))
    return stub.requests[0]["sampling_params"]


async def test_without_options_the_models_own_sampling_is_used(gateway: Running, stub: StubEngine) -> None:
    sent = await params(gateway, stub)
    assert (sent["temperature"], sent["top_p"]) == (1.0, 0.95)
    assert sent["stop_token_ids"] == [END_OF_MSG]
    assert sent["skip_special_tokens"] is False
    assert not {"sampling_seed", "logit_bias", "stop", "regex", "structural_tag"} & set(sent)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"top_k": 5, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1}),
        ({"top_k": -1}, {"top_k": -1}),
        (
            {"frequency_penalty": 0.5, "presence_penalty": -1},
            {"frequency_penalty": 0.5, "presence_penalty": -1},
        ),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"logit_bias": {"65": -100}}, {"logit_bias": {"65": -100}}),
        ({"max_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_completion_tokens": 5, "max_tokens": 5}, {"max_new_tokens": 5}),
        ({"seed": 3, "temperature": 0}, {"temperature": 0}),
    ],
)
async def test_an_option_reaches_the_engine(
    gateway: Running, stub: StubEngine, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    sent = await params(gateway, stub, **fields)
    assert {key: sent[key] for key in expected} == expected


async def test_fields_without_influence_on_the_answer_are_accepted(gateway: Running, stub: StubEngine) -> None:
    neutral = await params(gateway, stub)
    sent = await params(
        gateway,
        stub,
        user="u",
        safety_identifier="s",
        metadata={"a": "b"},
        prompt_cache_key="k",
        store=False,
        service_tier="auto",
        modalities=["text"],
        logprobs=False,
        top_logprobs=0,
        stop=None,
        seed=None,
        n=1,
        stream=False,
        parallel_tool_calls=True,
    )
    assert sent == neutral


async def test_the_session_name_is_sent_back_whoever_gives_it(gateway: Running) -> None:
    url = "/v1/chat/completions"
    by_key = await gateway.client.post(url, json=chat(prompt_cache_key="a b\nü"))
    assert by_key.headers["x-k3-session"] == "a b%0A%C3%BC"
    echoed = await gateway.client.post(url, json=chat(), headers={"x-k3-session": by_key.headers["x-k3-session"]})
    assert echoed.headers["x-k3-session"] == "a b%0A%C3%BC"
    assert echoed.json()["k3"]["cache"]["session"] == "session:a b\nü"
    by_header = await gateway.client.post(
        url, json=streamed(chat(prompt_cache_key="key")), headers={"x-k3-session": "header"}
    )
    assert by_header.headers["x-k3-session"] == "header"
    assert "x-k3-session" not in (await gateway.client.post(url, json=chat())).headers


class TestSeeds:
    """In front of an engine that samples deterministically."""

    @pytest.fixture
    def settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {**settings, "seeded_sampling": True}

    @pytest.mark.parametrize("seed", [0, 41, 2**63 - 1])
    async def test_a_seed_is_passed_on_and_every_choice_has_its_own(
        self, gateway: Running, stub: StubEngine, seed: int
    ) -> None:
        await gateway.ask(chat(seed=seed, n=3))
        seeds = [request["sampling_params"]["sampling_seed"] for request in stub.requests]
        assert sorted(seeds) == sorted((seed + i + 2**63) % 2**64 - 2**63 for i in range(3))


async def test_a_contract_of_the_request_becomes_a_constraint(gateway: Running, stub: StubEngine) -> None:
    free = await params(gateway, stub, tools=[WEATHER_TOOL])
    assert "structural_tag" not in free
    forced = await params(gateway, stub, tools=[WEATHER_TOOL], tool_choice="required")
    assert "get_weather" in forced["structural_tag"]
    formatted = await params(gateway, stub, response_format={"type": "json_object"})
    assert json.loads(formatted["structural_tag"])


class TestUntrainedWeights:
    """With every turn held to the turn grammar."""

    @pytest.fixture
    def settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {**settings, "constrained_by_default": True}

    async def test_every_turn_is_constrained(self, gateway: Running, stub: StubEngine) -> None:
        assert json.loads((await params(gateway, stub))["structural_tag"])
