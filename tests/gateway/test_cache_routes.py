"""Routes that steer the engine's cache: passed on as the engine understands them, or refused with the reason."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.settings import GatewaySettings
from k3_sglang.chat.encode import encode
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import WEATHER_TOOL, chat, user
from tests.gateway.conftest import Running
from tests.gateway.pictures import data_url, image_part, picture
from tests.gateway.serving import serving
from tests.gateway.stub_engine import StubEngine, says
from tests.gateway.vocabulary import TurnWriter

PATHS = ("release", "abandon", "pin")
END_OF_MSG = 258


@pytest.fixture
def stub(stub: StubEngine) -> StubEngine:
    """The scripted engine with the checkpoint cache."""
    stub.cache_backend = "k3"
    return stub


async def test_sessions_are_named_to_the_engine_as_in_completions(gateway: Running, stub: StubEngine) -> None:
    await gateway.ask(chat(user="jo"))
    name = json.loads(stub.requests[0]["sampling_params"]["custom_params"]["k3_cache"])["session"]
    post = gateway.client.post
    assert (await post("/v1/k3/cache/release", json={"session": "user:jo"})).status_code == 200
    assert (await gateway.client.delete("/v1/k3/sessions/user:jo")).json()["session"] == "user:jo"
    assert (await post("/v1/k3/cache/abandon", json={"session": "session:a/b c", "from": 7})).status_code == 200
    await gateway.client.delete("/v1/k3/sessions/session%3Aa%2Fb%20c")
    assert stub.commands == [
        ("release", {"session": name}),
        ("release", {"session": name}),
        ("abandon", {"session": "session:a/b c", "from": 7}),
        ("release", {"session": "session:a/b c"}),
    ]


async def test_a_pin_by_messages_sends_their_ids_without_what_is_for_one_turn(
    gateway: Running, stub: StubEngine, tokenizer: K3Tokenizer
) -> None:
    shaping = {"messages": [user("a"), user("b")], "tools": [WEATHER_TOOL], "tool_choice": "required"}
    answer = await gateway.client.post("/v1/k3/cache/pin", json={**shaping, "seconds": 30})
    request = replace(parse_request(shaping), tool_choice=None, add_generation_prompt=False)
    ((command, body),) = stub.commands
    assert command == "pin"
    assert body["ids"] == list(encode(request, tokenizer).ids)
    assert (body["seconds"], answer.json()["prompt_tokens"]) == (30, len(body["ids"]))
    assert body["now_s"] > 1e9


async def test_a_pin_within_a_named_session_has_its_turns_as_they_were_generated(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda _: says(writer.turn("my thoughts", "Hi"), end_of_msg=END_OF_MSG)
    headers = {"x-k3-session": "one"}
    body = chat()
    assert (await gateway.client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    messages = [*body["messages"], {"role": "assistant", "content": "Hi"}]
    asked = {"messages": messages, "seconds": 30}
    for given in (headers, {}):
        assert (await gateway.client.post("/v1/k3/cache/pin", json=asked, headers=given)).status_code == 200
    (_, named), (_, nameless) = stub.commands
    generated = [*stub.requests[0]["input_ids"], *writer.turn("my thoughts", "Hi")]
    assert named["ids"][: len(generated)] == generated
    assert nameless["ids"][: len(generated)] != generated


async def test_the_tree_can_be_left_out(gateway: Running, stub: StubEngine) -> None:
    assert (await gateway.client.get("/v1/k3/cache")).json()["object"] == "k3.cache"
    await gateway.client.get("/v1/k3/cache?tree=0")
    assert stub.commands == [("dump", None), ("metrics", None)]
    assert (await gateway.client.get("/v1/k3/cache?tree=2")).status_code == 400


async def test_what_the_engine_refuses_reaches_the_client_in_its_words(gateway: Running, stub: StubEngine) -> None:
    stub.refusal = "session is odd"
    response = await gateway.client.delete("/v1/k3/sessions/user:a")
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith("session is odd")


async def test_a_picture_cannot_be_pinned_by_messages(gateway: Running, stub: StubEngine) -> None:
    body = {"seconds": 5, "messages": [{"role": "user", "content": [image_part(data_url(picture()))]}]}
    response = await gateway.client.post("/v1/k3/cache/pin", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[0]"
    assert stub.commands == []


@pytest.mark.parametrize("backend", [None, "hiradix"])
async def test_another_cache_cannot_be_steered(
    settings: dict[str, Any], tokenizer: K3Tokenizer, stub: StubEngine, backend: str | None
) -> None:
    stub.cache_backend = backend
    async with serving(stub.app()) as url:
        app = create_app(GatewaySettings(**settings), SGLangEngine(url), tokenizer)
        async with serving(app) as own, httpx.AsyncClient(base_url=own, trust_env=False) as client:
            response = await client.delete("/v1/k3/sessions/user:a")
            assert (await client.get("/v1/k3/cache")).status_code == 409
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "cache_unavailable"
    assert stub.commands == []


async def test_the_routes_can_be_taken_away(settings: dict[str, Any], tokenizer: K3Tokenizer, stub: StubEngine) -> None:
    async with serving(stub.app()) as url:
        app = create_app(GatewaySettings(**settings, cache_routes=False), SGLangEngine(url), tokenizer)
        async with serving(app) as own, httpx.AsyncClient(base_url=own, trust_env=False) as client:
            statuses = [(await client.post(f"/v1/k3/cache/{path}", json={})).status_code for path in PATHS]
            statuses.append((await client.delete("/v1/k3/sessions/user:a")).status_code)
            await Running(app, own, client).ask(chat())
    assert statuses == [404] * 4
    assert "custom_params" in stub.requests[0]["sampling_params"]


async def test_an_engine_that_is_gone_is_a_503(
    settings: dict[str, Any], tokenizer: K3Tokenizer, stub: StubEngine
) -> None:
    async with AsyncExitStack() as stack:
        async with serving(stub.app()) as url:
            app = create_app(GatewaySettings(**settings), SGLangEngine(url), tokenizer)
            own = await stack.enter_async_context(serving(app))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=own, trust_env=False))
            await client.get("/v1/models")  # answered once the gateway has asked the engine
        response = await client.delete("/v1/k3/sessions/user:a")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unavailable"
