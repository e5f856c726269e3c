"""The Responses API over HTTP: the background, cancelling and deleting, faults, and what is stored for how long."""

from typing import Any

import anyio
import pytest

from agent_runtime.gateway.responses.background import MAX_RUNNING
from tests.gateway.bodies import MODEL
from tests.gateway.conftest import Running
from tests.gateway.responses_client import END_OF_MSG, NEVER, Client
from tests.gateway.responses_items import asks, events_of, message, output
from tests.gateway.stub_engine import Script, StubEngine, says
from tests.gateway.vocabulary import TurnWriter


@pytest.fixture
def client(gateway: Running, stub: StubEngine) -> Client:
    """A client of the served gateway."""
    return Client(gateway, stub)


async def test_a_response_in_the_background_is_fetched_when_it_is_done(
    client: Client, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda _: says(writer.turn("T", "Hi"), end_of_msg=END_OF_MSG)
    begun = await client.post("", asks(background=True))
    assert (begun["status"], begun["output"], begun["background"]) == ("in_progress", [], True)
    done = await client.until_over(begun["id"])
    assert done["status"] == "completed" and done["output"][1]["content"][0]["text"] == "Hi"
    assert await client.post(f"/{begun['id']}/cancel") == done


async def test_cancelling_a_response_aborts_it_in_the_engine(client: Client, stub: StubEngine) -> None:
    stub.plan = lambda _: NEVER
    begun = await client.post("", asks(background=True))
    await stub.until(lambda engine: bool(engine.running))
    refused = await client.post("", asks(previous_response_id=begun["id"]), status=400)
    assert refused["error"]["code"] == "previous_response_not_usable"
    assert (await client.post(f"/{begun['id']}/cancel"))["status"] == "cancelled"
    await stub.until(lambda engine: bool(engine.aborts) and not engine.running)
    assert (await client.get(begun["id"]))["status"] == "cancelled"


async def test_deleting_a_running_response_aborts_it(client: Client, stub: StubEngine) -> None:
    stub.plan = lambda _: NEVER
    begun = await client.post("", asks(background=True))
    await stub.until(lambda engine: bool(engine.running))
    answer = await client.http.delete(f"/v1/responses/{begun['id']}")
    assert answer.json() == {"id": begun["id"], "object": "response", "deleted": True}
    await stub.until(lambda engine: bool(engine.aborts) and not engine.running)
    assert (await client.get(begun["id"], status=404))["error"]["code"] == "response_not_found"


async def test_a_response_of_the_foreground_is_cancelled_by_its_client_leaving(
    client: Client, stub: StubEngine, writer: TurnWriter
) -> None:
    done = await client.ask(asks(), writer.turn())
    refused = await client.post(f"/{done['id']}/cancel", status=400)
    assert refused["error"]["code"] == "not_in_background"
    stub.plan = lambda _: Script([writer.text("T")], None)
    async with client.http.stream("POST", "/v1/responses", json=asks(stream=True)) as answer:
        lines = answer.aiter_lines()
        while not (line := await anext(lines)).startswith("data: "):
            pass
    name = events_of(f"event: response.created\n{line}")[0]["response"]["id"]
    await stub.until(lambda engine: bool(engine.aborts) and not engine.running)
    assert (await client.until_over(name))["status"] == "cancelled"


async def test_failures_are_errors_before_the_stream_and_events_in_it(
    client: Client, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda _: Script([], None, status=400, error={"error": {"message": "too large"}})
    refused = await client.post("", asks(stream=True), status=400)
    assert refused["error"]["code"] == "engine_rejected"
    stub.plan = lambda _: Script([writer.text("T"), ConnectionError("died")], None)
    events = events_of((await client.http.post("/v1/responses", json=asks(stream=True))).text)
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
    assert [item["status"] for item in failed["output"]] == ["incomplete"]
    assert await client.get(failed["id"]) == failed
    begun = await client.post("", asks(background=True))
    assert (await client.until_over(begun["id"]))["status"] == "failed"


async def test_faults_found_behind_the_codec_name_the_fields_of_the_request(client: Client, stub: StubEngine) -> None:
    unknown = await client.post("", asks([message("user", "x"), output("c9", "x")]), status=400)
    assert unknown["error"]["param"] == "input[1].tool_call_id"
    assert (await client.post("", asks(model="other"), status=404))["error"]["param"] == "model"
    assert (await client.post("", asks(reasoning={"effort": "odd"}), status=400))["error"][
        "param"
    ] == "reasoning.effort"
    assert (await client.post("", asks("x" * 100_000), status=400))["error"]["param"] == "input"
    missing = await client.post("", asks(previous_response_id="resp_0"), status=404)
    assert missing["error"]["param"] == "previous_response_id"
    assert (await client.post("", asks(previous_response_id=7), status=400))["error"]["param"] == "previous_response_id"
    assert stub.requests == []


async def test_numbers_and_depths_that_json_cannot_hold_are_refused(client: Client, stub: StubEngine) -> None:
    deep = '{"a":' * 50_000 + "1" + "}" * 50_000
    for odd in ("1e400", deep):
        content = f'{{"model": "{MODEL}", "input": [{{"type": "reasoning", "odd": {odd}}}]}}'
        answer = await client.http.post("/v1/responses", content=content)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"
    assert stub.requests == []


async def test_what_is_not_stored_cannot_be_had(client: Client, writer: TurnWriter) -> None:
    response = await client.ask(asks(store=False), writer.turn())
    await client.get(response["id"], status=404)
    await client.post("", asks(previous_response_id=response["id"]), status=404)
    reference = [{"type": "item_reference", "id": response["output"][0]["id"]}]
    assert (await client.post("", asks(reference), status=404))["error"]["code"] == "item_not_found"


async def test_references_lead_to_items_of_stored_responses(client: Client, writer: TurnWriter) -> None:
    ids = writer.turn("R", "Hi")
    response = await client.ask(asks(), ids)
    prompt = client.prompt
    references = [{"type": "item_reference", "id": item["id"]} for item in response["output"]]
    await client.ask(asks([message("user", "Hello"), *references, message("user", "more")]), writer.turn())
    assert client.prompt[: len(prompt) + len(ids)] == prompt + ids


async def test_input_items_come_in_pages(client: Client, writer: TurnWriter) -> None:
    response = await client.ask(asks([message("user", str(number)) for number in range(5)]), writer.turn())
    path = f"{response['id']}/input_items"
    seen: list[str] = []
    after = ""
    while True:
        page = await client.get(f"{path}?limit=2{after}")
        seen += [item["content"][0]["text"] for item in page["data"]]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert seen == ["4", "3", "2", "1", "0"]
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after"), ("size=1", "size")):
        assert (await client.get(f"{path}?{query}", status=400))["error"]["param"] == param
    assert (await client.get(f"{response['id']}?stream=true", status=400))["error"]["param"] == "stream"
    assert (await client.get(f"{response['id']}?include=x", status=400))["error"]["param"] == "include"


@pytest.fixture
def small_store(settings: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """A gateway that keeps little."""
    settings.update(request.param)


@pytest.mark.parametrize(
    "small_store", [{"stored_responses": 2}, {"stored_responses_bytes": 4_000}], ids=["number", "size"], indirect=True
)
async def test_the_oldest_responses_go_first(small_store: None, client: Client, writer: TurnWriter) -> None:
    names = [(await client.ask(asks(str(number)), writer.turn()))["id"] for number in range(4)]
    await client.get(names[0], status=404)
    await client.get(names[3])


@pytest.mark.parametrize("small_store", [{"keep_alive_s": 0.05}], ids=["keep-alive"], indirect=True)
async def test_a_silent_stream_is_kept_alive(
    small_store: None, client: Client, stub: StubEngine, writer: TurnWriter
) -> None:
    go_on = anyio.Event()
    stub.plan = lambda _: Script([writer.text("T"), go_on.wait, writer.turn("", "x")], {"type": "stop", "matched": 258})
    text = ""
    async with client.http.stream("POST", "/v1/responses", json=asks(stream=True)) as answer:
        async for piece in answer.aiter_text():
            text += piece
            if ": keep-alive\n\n" in text:
                go_on.set()
    assert events_of(text)[-1]["type"] == "response.completed"


async def test_background_responses_have_a_limit(client: Client, stub: StubEngine) -> None:
    stub.plan = lambda _: NEVER
    begun = [await client.post("", asks(background=True)) for _ in range(MAX_RUNNING)]
    refused = await client.post("", asks(background=True), status=429)
    assert refused["error"]["code"] == "rate_limit_exceeded"
    await stub.until(lambda engine: len(engine.running) == MAX_RUNNING)
    await client.post(f"/{begun[0]['id']}/cancel")
    await stub.until(lambda engine: len(engine.running) == MAX_RUNNING - 1)
    # The others are aborted when the gateway stops; the engine's own fixture would wait for them else.


async def test_what_sglangs_router_adds_is_taken(gateway: Running) -> None:
    added = {"store": True, "temperature": 1.0, "priority": 0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    answer = await gateway.client.post("/v1/responses", json={"model": MODEL, "input": "Hi", "stream": None, **added})
    assert answer.status_code == 200, answer.text
    refused = await gateway.client.post("/v1/responses", json={"model": MODEL, "input": "Hi", "priority": 1})
    assert refused.status_code == 400 and "one queue" in refused.json()["error"]["message"]
