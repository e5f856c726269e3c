"""Fields before another server: passed on as its profile spells them, or refused with the field and the profile."""

from pathlib import Path
from typing import Any

import pytest

from agent_runtime.errors import SettingsError
from agent_runtime.gateway.foreign import ForeignServer
from agent_runtime.upstream.profiles import PROFILES
from tests.agent.scripted_endpoint import says
from tests.gateway.bodies import WEATHER_TOOL, chat, chat_with_tool
from tests.upstream.conftest import NAMES, ask, scripted, settings_for

NAMED = {"type": "function", "function": {"name": "get_weather"}}
STRICT_TOOL = {"type": "function", "function": {**WEATHER_TOOL["function"], "strict": True}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
PICTURE = {"type": "image_url", "image_url": {"url": "https://example.invalid/a.png", "detail": "high"}}
DYNAMIC: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}, {"role": "system", "tools": [WEATHER_TOOL]}]

REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("moonshot", chat(temperature=0.3), "temperature", "fixed at 1"),
    ("moonshot", chat(top_k=5), "top_k", "does not know"),
    ("moonshot", chat(seed=1), "seed", "does not know"),
    ("moonshot", chat(thinking={"type": "disabled"}), "thinking", "always thinks"),
    ("moonshot", chat_with_tool(tool_choice=NAMED), "tool_choice", "auto, none, required"),
    ("moonshot", chat_with_tool(parallel_tool_calls=False), "parallel_tool_calls", "several tools"),
    ("sglang", chat(seed=1), "seed", "ignores"),
    ("tokenspeed", chat(seed=1), "seed", "ignores"),
    ("tokenspeed", {**chat(), "messages": DYNAMIC}, "messages[1].tools", "own list"),
    ("generic", chat(thinking=False), "thinking", "always thinks"),
    ("generic", chat(min_p=0.1), "min_p", "does not know"),
    ("generic", {**chat(), "messages": DYNAMIC}, "messages[1].tools", "own list"),
    *(("vllm", chat(k3={"cache": {name: 1}}), f"k3.cache.{name}", "no cache") for name in ("wait_s", "fork", "pin_s")),
]

PASSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("moonshot", chat(temperature=1.0, top_p=0.95), {"temperature": 1.0, "top_p": 0.95}),
    ("moonshot", chat(prompt_cache_key="s"), {"prompt_cache_key": "s"}),
    ("moonshot", chat(max_tokens=5), {"max_completion_tokens": 5}),
    ("moonshot", chat(reasoning_effort="medium"), {"reasoning_effort": "high"}),
    ("moonshot", {**chat(), "messages": DYNAMIC}, {}),
    ("vllm", chat(thinking={"type": "disabled"}), {"chat_template_kwargs": {"thinking": False}}),
    ("vllm", chat(seed=4, top_k=3), {"seed": 4, "top_k": 3}),
    ("vllm", chat_with_tool(tool_choice=NAMED), {"tool_choice": NAMED, "tools": [WEATHER_TOOL]}),
    ("sglang", chat(thinking=False), {"reasoning_effort": "none"}),
    ("sglang", chat(thinking={"type": "enabled", "effort": "low"}), {"reasoning_effort": "low"}),
    ("sglang", chat(tools=[STRICT_TOOL]), {"tools": [STRICT_TOOL]}),
    ("tokenspeed", chat(response_format=SCHEMA), {"response_format": SCHEMA}),
    ("tokenspeed", chat(repetition_penalty=1.1), {"repetition_penalty": 1.1}),
    ("generic", chat(max_completion_tokens=5), {"max_tokens": 5}),
    ("generic", chat(max_tokens=1_048_576), {"max_tokens": 100_000}),
    ("generic", chat(user="u", metadata={"session_id": "a"}, prompt_cache_key="s"), {}),
    ("generic", chat_with_tool(tool_choice="required"), {"tool_choice": "required", "tools": [WEATHER_TOOL]}),
    ("generic", chat_with_tool(parallel_tool_calls=False), {"parallel_tool_calls": False, "tools": [WEATHER_TOOL]}),
]


@pytest.mark.parametrize(("profile", "body", "param", "reason"), REFUSED)
async def test_what_the_server_does_not_honour_is_refused_by_name(
    profile: str, body: dict[str, Any], param: str, reason: str
) -> None:
    async with scripted(says("Hi"), profile=profile) as (endpoint, client):
        error = (await ask(client, body, 400))["error"]
    assert (error["code"], error["param"]) == ("unsupported_by_upstream", param)
    assert f"(profile {profile})" in error["message"] and reason in error["message"]
    assert endpoint.requests == []


@pytest.mark.parametrize(("profile", "body", "fields"), PASSED)
async def test_what_it_honours_is_sent_in_its_spelling_and_nothing_else(
    profile: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    async with scripted(says("Hi"), profile=profile, upstream_model="their/model") as (endpoint, client):
        await ask(client, body)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    assert endpoint.requests == [{"model": "their/model", "messages": body["messages"], **fields, **stream}]


async def test_images_and_marks_pass_through_and_sources_are_not_read(profile: str) -> None:
    text = {"type": "text", "text": "What is it?", "cache_control": {"type": "ephemeral"}}
    async with scripted(says("A cat."), profile=profile) as (endpoint, client):
        answer = await ask(client, {**chat(), "messages": [{"role": "user", "content": [text, PICTURE]}]})
    assert endpoint.requests[0]["messages"][0]["content"] == [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": "https://example.invalid/a.png"}},
    ]
    assert answer["k3"]["cache"]["hinted"] is False


async def test_choices_are_requests_of_their_own_with_seeds_that_move_on() -> None:
    async with scripted(says("Hi"), profile="vllm") as (endpoint, client):
        answer = await ask(client, chat(n=3, seed=2**63 - 1))
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Hi"] * 3
    assert sorted(request["seed"] for request in endpoint.requests) == [-(2**63), 1 - 2**63, 2**63 - 1]
    assert all("n" not in request for request in endpoint.requests)
    assert answer["usage"]["completion_tokens"] == 30 and answer["usage"]["prompt_tokens"] == 100


async def test_unknown_fields_and_models_and_bad_bodies_are_refused_as_before_an_engine(profile: str) -> None:
    async with scripted(says("Hi"), profile=profile) as (endpoint, client):
        assert (await ask(client, chat(typical_p=1), 400))["error"]["code"] == "unsupported_field"
        assert (await ask(client, chat(model="other"), 404))["error"]["code"] == "model_not_found"
        assert (await ask(client, chat(temperature=3), 400))["error"]["param"] == "temperature"
        partial = {**chat(), "messages": [{"role": "assistant", "content": "A", "partial": True}]}
        assert (await ask(client, partial, 400))["error"]["param"] == "messages[0].partial"
        cache = await client.get("/v1/k3/cache")
    assert (cache.status_code, cache.json()["error"]["code"]) == (409, "cache_unavailable")
    assert endpoint.requests == []


async def test_models_and_health_speak_for_the_upstream() -> None:
    async with scripted(says("Hi")) as (endpoint, client):
        assert (await client.get("/v1/models")).json()["data"][0]["context_length"] == 100_000
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/health?deep=1")).status_code == 200
    assert endpoint.requests[0]["max_tokens"] == 1


async def test_the_key_comes_from_a_variable_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="UPSTREAM_TEST_KEY, which is not set"):
        ForeignServer(settings_for("http://127.0.0.1:9/v1", upstream_key_env="UPSTREAM_TEST_KEY"))
    file = tmp_path / "key"
    with pytest.raises(SettingsError, match="cannot read upstream_key_file"):
        ForeignServer(settings_for("http://127.0.0.1:9/v1", upstream_key_file=file))
    file.write_text("from-file\n", "utf-8")
    monkeypatch.setenv("UPSTREAM_TEST_KEY", "from-env")
    cases: list[dict[str, Any]] = [{"upstream_key_env": "UPSTREAM_TEST_KEY"}, {"upstream_key_file": file}, {}]
    for more in cases:
        async with scripted(says("Hi"), **more) as (endpoint, client):
            await ask(client, chat())
        expected = {"upstream_key_env": "Bearer from-env", "upstream_key_file": "Bearer from-file"}
        assert endpoint.keys == [expected.get(next(iter(more), ""))]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"upstream": "engine"}, "set upstream to 'openai'"),
        ({"upstream_url": None}, "upstream_url is not set"),
        ({"upstream_url": "ftp://x"}, "pattern"),
        ({"upstream_profile": "other"}, "moonshot"),
        ({"constrained_by_default": True}, "settings of an engine"),
        ({"upstream_key_env": "A", "upstream_key_file": "b"}, "keep one"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        settings_for("http://127.0.0.1:9/v1", **values)


def test_every_profile_is_listed_in_the_documentation(repository: Path) -> None:
    page = (repository / "docs" / "upstreams.md").read_text("utf-8")
    for name in NAMES:
        assert f"`{name}`" in page
        assert f"`{PROFILES[name].thinking_field}`" in page
