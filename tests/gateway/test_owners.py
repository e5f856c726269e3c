"""What one key's owner has made is nobody else's: turns, sessions, stored responses, cache control, the ledger."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.keys import ApiKeys
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.guard.again import made_again
from agent_runtime.ledger.__main__ import main
from agent_runtime.ledger.reading import LedgerReader
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import MODEL, chat, chat_with_tool, continued, tool_results, user
from tests.gateway.conftest import Running
from tests.gateway.responses_items import asks
from tests.gateway.serving import serving
from tests.gateway.stub_engine import Script, StubEngine, says
from tests.gateway.vocabulary import TurnWriter

ANN, ANN_TOO, BOB = "ann-key-0123456789", "ann-new-key-012345", "bob-key-0123456789"
KEYS = {ANN: "ann", ANN_TOO: "ann", BOB: "bob"}
SECRET = "the thinking of ann"
END_OF_MSG = 258
CALL = ("get_weather", (("city", "string", "Oslo"),))

Json = dict[str, Any]


@pytest.fixture
def keys() -> ApiKeys:
    """Two owners, one with two keys."""
    return ApiKeys(KEYS)


@pytest.fixture
def stub(stub: StubEngine, writer: TurnWriter) -> StubEngine:
    """An engine with the checkpoint cache that thinks a secret and calls a tool."""
    stub.cache_backend = "k3"
    stub.plan = lambda _: says(writer.turn(SECRET, "said", calls=(CALL,)), end_of_msg=END_OF_MSG)
    return stub


async def ask(client: httpx.AsyncClient, key: str, body: Json, path: str = "/v1/chat/completions", **more: Any) -> Json:
    """POST with a key; the answer must be a success."""
    headers = {"x-api-key": key, **more}
    response = await client.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def prompt(stub: StubEngine) -> str:
    """The text of the last prompt."""
    return bytes(token for token in stub.requests[-1]["input_ids"] if token < 256).decode()


def without_thinking(body: Json) -> Json:
    """The same request from a client that drops thinking."""
    messages = [{key: value for key, value in m.items() if key != "reasoning_content"} for m in body["messages"]]
    return {**body, "messages": messages}


@pytest.mark.parametrize("named", [{"prompt_cache_key": "s"}, {"k3": {"cache": {"session": "s"}}}, {"user": "u"}, {}])
async def test_neither_a_session_nor_a_call_id_leads_to_the_turn_of_another_owner(
    gateway: Running, stub: StubEngine, named: Json
) -> None:
    body = chat_with_tool(**named)
    answer = await ask(gateway.client, ANN, body)
    following = without_thinking(continued(body, answer, *tool_results(answer, "rain")))
    for_bob = await ask(gateway.client, BOB, following)
    assert for_bob["k3"]["replay"]["turns"] == [{"index": 1, "verdict": "missing", "reason": "unknown"}]
    assert SECRET not in prompt(stub)
    for key in (ANN, ANN_TOO):
        for_ann = await ask(gateway.client, key, following)
        assert for_ann["k3"]["replay"]["turns"][0]["verdict"] == "repaired"
        assert SECRET in prompt(stub)


async def test_a_signature_is_worth_nothing_to_another_owner(gateway: Running, stub: StubEngine) -> None:
    body = {"model": MODEL, "max_tokens": 500, "messages": [user("q")]}
    answer = await ask(gateway.client, ANN, body, "/v1/messages")
    signature = answer["content"][0]["signature"]
    turn = [{"type": "thinking", "thinking": "", "signature": signature}, {"type": "text", "text": "said"}]
    history = {**body, "messages": [user("q"), {"role": "assistant", "content": turn}, user("go on")]}
    for key, is_known in ((BOB, False), (ANN, True)):
        await ask(gateway.client, key, history, "/v1/messages")
        assert (SECRET in prompt(stub)) is is_known


async def test_a_turn_left_out_is_put_back_for_its_owner_only(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda _: says(writer.turn(SECRET, "said"), end_of_msg=END_OF_MSG)
    await ask(gateway.client, ANN, chat("q1", prompt_cache_key="s"))
    shortened = chat(prompt_cache_key="s") | {"messages": [user("q1"), user("q2")]}
    for key, is_known in ((BOB, False), (ANN, True)):
        await ask(gateway.client, key, shortened)
        assert (SECRET in prompt(stub)) is is_known


async def test_a_stored_response_is_not_found_by_another_owner(gateway: Running, stub: StubEngine) -> None:
    made = await ask(gateway.client, ANN, asks(), "/v1/responses")
    item = made["output"][0]["id"]
    path = f"/v1/responses/{made['id']}"
    for method, end in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
        response = await gateway.client.request(method, f"{path}{end}", headers={"x-api-key": BOB})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "response_not_found")
    count = len(stub.requests)
    for body in (asks(previous_response_id=made["id"]), asks([{"type": "item_reference", "id": item}])):
        response = await gateway.client.post("/v1/responses", json=body, headers={"x-api-key": BOB})
        assert response.status_code in (400, 404) and SECRET not in response.text
    assert len(stub.requests) == count
    assert (await gateway.client.get(path, headers={"x-api-key": ANN_TOO})).json()["id"] == made["id"]


async def test_a_response_in_the_background_is_cancelled_by_its_owner_only(gateway: Running, stub: StubEngine) -> None:
    stub.plan = lambda _: Script([], None)
    made = await ask(gateway.client, ANN, asks(background=True), "/v1/responses")
    await stub.until(lambda engine: len(engine.running) == 1)
    path = f"/v1/responses/{made['id']}"
    for method, end in (("POST", "/cancel"), ("DELETE", "")):
        assert (await gateway.client.request(method, f"{path}{end}", headers={"x-api-key": BOB})).status_code == 404
    assert stub.aborts == [] and len(stub.running) == 1
    response = await gateway.client.post(f"{path}/cancel", headers={"x-api-key": ANN})
    assert response.json()["status"] == "cancelled"
    await stub.until(lambda engine: not engine.running)


async def test_the_engine_knows_equal_names_of_two_owners_as_two_sessions(gateway: Running, stub: StubEngine) -> None:
    names = list[str]()
    for key in (ANN, BOB):
        answer = await ask(gateway.client, key, chat(prompt_cache_key="s"))
        assert answer["k3"]["cache"]["session"] == "prompt_cache_key:s"
        hints = json.loads(stub.requests[-1]["sampling_params"]["custom_params"]["k3_cache"])
        names.append(hints["session"])
        headers = {"x-api-key": key}
        body = {"session": "prompt_cache_key:s"}
        await ask(gateway.client, key, body, "/v1/k3/cache/release")
        await ask(gateway.client, key, body, "/v1/k3/cache/abandon")
        assert (await gateway.client.delete("/v1/k3/sessions/prompt_cache_key:s", headers=headers)).status_code == 200
    assert names == ["ann/prompt_cache_key:s", "bob/prompt_cache_key:s"]
    told = [body["session"] for _, body in stub.commands]
    assert told == [names[0]] * 3 + [names[1]] * 3


async def test_no_spelling_of_a_session_reaches_that_of_another_owner(gateway: Running, stub: StubEngine) -> None:
    for session in ("ann/prompt_cache_key:s", "prompt_cache_key:../ann/s", "bob/prompt_cache_key:s"):
        await gateway.client.post("/v1/k3/cache/release", json={"session": session}, headers={"x-api-key": BOB})
    assert all(body["session"].startswith("bob/prompt_cache_key:") for _, body in stub.commands)


async def test_a_pin_by_messages_does_not_know_the_turns_of_another_owner(gateway: Running, stub: StubEngine) -> None:
    body = chat_with_tool(prompt_cache_key="s")
    answer = await ask(gateway.client, ANN, body)
    history = without_thinking(continued(body, answer, *tool_results(answer, "rain")))
    pin = {"seconds": 60, "messages": history["messages"], "tools": body["tools"]}
    pinned = {}
    for key in (ANN, BOB):
        await ask(gateway.client, key, pin, "/v1/k3/cache/pin")
        pinned[key] = bytes(token for token in stub.commands[-1][1]["ids"] if token < 256).decode()
    assert SECRET in pinned[ANN] and SECRET not in pinned[BOB]


async def test_the_tree_of_all_is_shown_to_none(gateway: Running) -> None:
    for path in ("/v1/k3/cache", "/v1/k3/cache?tree=0"):
        response = await gateway.client.get(path, headers={"x-api-key": ANN})
        assert response.status_code == 200 and "nodes" not in response.text
    response = await gateway.client.get("/v1/k3/cache?tree=1", headers={"x-api-key": ANN})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "tree_not_shown")


async def test_counts_of_histories_are_those_of_the_asking_owner(gateway: Running) -> None:
    await ask(gateway.client, ANN, chat())
    for key, turns in ((ANN, 1), (ANN_TOO, 1), (BOB, 0)):
        counts = (await gateway.client.get("/v1/k3/replay", headers={"x-api-key": key})).json()
        assert counts["known_turns"] == turns and counts["requests"].get("new", 0) == turns


async def test_tokenize_does_not_show_the_thinking_of_another_owner(gateway: Running, tokenizer: K3Tokenizer) -> None:
    body = chat_with_tool(prompt_cache_key="s")
    answer = await ask(gateway.client, ANN, body)
    history = without_thinking(continued(body, answer, *tool_results(answer, "rain")))
    for key, is_known in ((BOB, False), (ANN, True)):
        tokens = (await ask(gateway.client, key, history, "/v1/tokenize"))["tokens"]
        assert (SECRET in bytes(token for token in tokens if token < 256).decode()) is is_known


async def test_one_owner_cannot_make_the_turns_or_responses_of_another_go(
    settings: Json, tokenizer: K3Tokenizer, engine_url: str, stub: StubEngine
) -> None:
    settings = {**settings, "recorded_turns": 4, "stored_responses": 4}
    body = chat_with_tool()
    async with started(settings, tokenizer, engine_url) as client:
        answer = await ask(client, ANN, body)
        kept = await ask(client, ANN, asks(), "/v1/responses")
        for number in range(6):
            await ask(client, BOB, chat(f"other {number}"))
            await ask(client, BOB, asks(f"other {number}"), "/v1/responses")
        again = await ask(client, ANN, continued(body, answer, *tool_results(answer, "rain")))
        assert again["k3"]["replay"]["verdict"] == "exact"
        assert (await client.get(f"/v1/responses/{kept['id']}", headers={"x-api-key": ANN})).status_code == 200


@asynccontextmanager
async def started(
    settings: Json, tokenizer: K3Tokenizer, engine_url: str, owners: dict[str, str] | None = None
) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A gateway process with some keys."""
    keys = ApiKeys(KEYS if owners is None else owners)
    app = create_app(GatewaySettings(**settings), SGLangEngine(engine_url), tokenizer, keys=keys)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        yield client


async def test_the_ledger_gives_every_owner_the_own_turns_back_after_a_restart(
    settings: Json,
    tokenizer: K3Tokenizer,
    engine_url: str,
    stub: StubEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger = tmp_path / "ledger.db"
    settings = {**settings, "ledger": str(ledger)}
    body = chat_with_tool(prompt_cache_key="s")
    async with started(settings, tokenizer, engine_url) as client:
        answer = await ask(client, ANN, body)
        await ask(client, BOB, chat_with_tool(prompt_cache_key="s"))
    following = without_thinking(continued(body, answer, *tool_results(answer, "rain")))
    async with started(settings, tokenizer, engine_url) as client:
        assert (await ask(client, BOB, following))["k3"]["replay"]["verdict"] != "repaired"
        assert SECRET not in prompt(stub)
        assert (await ask(client, ANN, following))["k3"]["replay"]["verdict"] == "repaired"
        assert SECRET in prompt(stub)
    with LedgerReader(ledger) as reader:
        sessions = {(session.owner, session.name) for session in reader.sessions()}
        assert sessions == {("ann", "prompt_cache_key:s"), ("bob", "prompt_cache_key:s")}
        assert all(outcome.same for outcome in made_again(reader, tokenizer))
    assert main(["sessions", str(ledger)]) == 0
    assert "ann\tprompt_cache_key:s" in capsys.readouterr().out
    async with started(settings, tokenizer, engine_url, {BOB: "carl"}) as client:
        assert (await ask(client, BOB, following))["k3"]["replay"]["verdict"] == "missing"
