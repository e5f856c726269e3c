"""The Responses API over HTTP: answers, streams, chains, background, and one session with chat completions."""

import json
from typing import Any

import anyio
import httpx
import pytest

from agent_runtime.gateway.responses.background import MAX_RUNNING
from tests.gateway.bodies import MODEL, WEATHER_TOOL, chat_with_tool
from tests.gateway.conftest import Running
from tests.gateway.responses_items import FLAT_TOOL, asks, events_of, message, output
from tests.gateway.stub_engine import Script, StubEngine, cut, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258
CALL = ("get_weather", (("city", "string", "Oslo"), ("days", "number", "3.0")))
NEVER = Script([], None)
EXACT = "exact; exact=1; repaired=0; missing=0; foreign=0"


class Client:
    """Asks the gateway; keeps the last answer's headers."""

    def __init__(self, gateway: Running, stub: StubEngine) -> None:
        self.http = gateway.client
        self._stub = stub
        self.headers = httpx.Headers()

    async def ask(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        """The response to a body, of an engine that generates ``ids``."""
        self._stub.plan = lambda _: says(ids, end_of_msg=END_OF_MSG, cached_tokens=3)
        return await self.post("", body)

    async def post(self, path: str, body: dict[str, Any] | None = None, status: int = 200) -> dict[str, Any]:
        """POST, which must be answered with ``status``."""
        answer = await self.http.post(f"/v1/responses{path}", json=body)
        assert answer.status_code == status, answer.text
        self.headers = answer.headers
        return answer.json()

    async def get(self, path: str, status: int = 200) -> dict[str, Any]:
        """GET, likewise."""
        answer = await self.http.get(f"/v1/responses/{path}")
        assert answer.status_code == status, answer.text
        return answer.json()

    async def until_over(self, name: str) -> dict[str, Any]:
        """Poll a response as its clients do."""
        while (response := await self.get(name))["status"] in ("queued", "in_progress"):
            await anyio.lowlevel.checkpoint()
        return response

    @property
    def prompt(self) -> list[int]:
        """Ids that the engine was last asked."""
        return self._stub.requests[-1]["input_ids"]


@pytest.fixture
def client(gateway: Running, stub: StubEngine) -> Client:
    """A client of the served gateway."""
    return Client(gateway, stub)


async def test_a_response_has_its_items_in_order_and_says_what_was_used(client: Client, writer: TurnWriter) -> None:
    ids = writer.turn("hm", "I look.", (CALL, CALL))
    body = asks(tools=[FLAT_TOOL], instructions="Sys", metadata={"a": "b"}, max_output_tokens=500)
    response = await client.ask(body, ids)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, prose, call, _ = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}] and "encrypted_content" not in reasoning
    assert prose["content"][0]["text"] == "I look."
    assert call["arguments"] == '{"city": "Oslo", "days": 3.0}' and call["call_id"].startswith("call_")
    names = [item["id"].partition("_")[0] for item in response["output"]]
    assert names == ["rs", "msg", "fc", "fc"] and response["id"].startswith("resp_")
    assert response["status"] == "completed" and {item["status"] for item in response["output"]} == {"completed"}
    assert response["usage"] == {
        "input_tokens": len(client.prompt), "input_tokens_details": {"cached_tokens": 3}, "output_tokens": len(ids),
        "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": len(client.prompt) + len(ids),
    }  # fmt: skip
    assert (response["instructions"], response["metadata"], response["tools"]) == ("Sys", {"a": "b"}, [FLAT_TOOL])
    assert (response["temperature"], response["top_p"], response["store"]) == (1.0, 0.95, True)
    assert await client.get(response["id"]) == response


async def test_a_stream_has_the_events_of_the_api_in_order_and_ends_with_the_same_response(
    client: Client, writer: TurnWriter
) -> None:
    ids = writer.turn("h", "I", (CALL,))
    response = await client.ask(asks(tools=[FLAT_TOOL], stream=False), ids)
    answer = await client.http.post("/v1/responses", json=asks(tools=[FLAT_TOOL], stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    delta = "response.function_call_arguments.delta"
    order = [event["type"] for event in events if event["type"] != delta]
    text = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    item = ["output_item.added", *text, "output_item.done"]
    assert order == [
        f"response.{kind}"
        for kind in (
            "created", "in_progress",
            *(kind.format("reasoning_text") for kind in item),
            *(kind.format("output_text") for kind in item),
            "output_item.added", "function_call_arguments.done", "output_item.done",
            "completed",
        )
    ]  # fmt: skip
    assert [event.get("output_index") for event in events if "item" in event] == [0, 0, 1, 1, 2, 2]
    call = events[-1]["response"]["output"][2]
    assert "".join(event["delta"] for event in events if event["type"] == delta) == call["arguments"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["usage"] is None

    def plain(response: dict[str, Any]) -> str:
        """Without what no two responses have in common."""
        text = json.dumps({**response, "created_at": 0, "completed_at": 0, "k3": None})
        return text.replace(response["id"].removeprefix("resp_"), "T").replace(response["output"][2]["call_id"], "C")

    assert plain(events[-1]["response"]) == plain(response)
    assert await client.get(events[-1]["response"]["id"]) == events[-1]["response"]


async def test_a_turn_that_is_cut_is_incomplete_and_its_cut_call_is_not_among_the_items(
    client: Client, stub: StubEngine, writer: TurnWriter
) -> None:
    whole = writer.turn("h", "I look", (CALL,))
    stub.plan = lambda _: cut(whole[:-70])
    for stream in (False, True):
        answer = await client.http.post("/v1/responses", json=asks(tools=[FLAT_TOOL], stream=stream))
        response = events_of(answer.text)[-1]["response"] if stream else answer.json()
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
        assert response["k3"]["incomplete_tool_calls"][0]["name"] == "get_weather"
    events = events_of(answer.text)
    assert events[-1]["type"] == "response.incomplete"
    dones = [event["item"]["status"] for event in events if event["type"] == "response.output_item.done"]
    assert dones == ["completed", "completed", "incomplete"]
    stub.plan = lambda _: cut(writer.text("thinking and"))
    (item,) = (await client.post("", asks()))["output"]
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")


async def test_a_turn_without_text_has_an_empty_message(client: Client, writer: TurnWriter) -> None:
    response = await client.ask(asks(), writer.turn("h", ""))
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][1]["content"][0]["text"] == ""


async def test_each_step_extends_the_last_whether_sent_whole_or_by_its_id(client: Client, writer: TurnWriter) -> None:
    first = asks(tools=[FLAT_TOOL], instructions="Sys")
    ids = writer.turn("hm\n", "I look.", (CALL, CALL))
    response = await client.ask(first, ids)
    prompt = client.prompt
    outputs = [output(item["call_id"], "rain") for item in response["output"] if item["type"] == "function_call"]

    whole = [message("user", "Hello"), *response["output"], *outputs]
    await client.ask({**first, "input": whole}, writer.turn())
    by_items = client.prompt
    assert by_items[: len(prompt) + len(ids)] == prompt + ids
    assert client.headers["x-k3-replay"] == EXACT

    second = await client.ask(
        {**first, "input": outputs, "previous_response_id": response["id"]}, writer.turn("x", "y")
    )
    assert client.prompt == by_items and client.headers["x-k3-replay"] == EXACT
    third = await client.ask({**first, "input": "and?", "previous_response_id": second["id"]}, writer.turn())
    assert client.headers["x-k3-replay"].startswith("exact; exact=2")
    assert client.prompt[: len(by_items)] == by_items

    listed = await client.get(f"{third['id']}/input_items?order=asc&limit=100")
    assert [item["type"] for item in listed["data"]] == [
        "message", "reasoning", "message", "function_call", "function_call", "function_call_output",
        "function_call_output", "reasoning", "message", "message",
    ]  # fmt: skip
    assert listed["data"][0]["content"] == [{"type": "input_text", "text": "Hello"}]


async def test_two_responses_fork_from_one(client: Client, writer: TurnWriter) -> None:
    root = await client.ask(asks("one"), writer.turn("R", "root"))
    prompts: list[list[int]] = []
    for text in ("left", "right", "left"):
        await client.ask(asks(text, previous_response_id=root["id"]), writer.turn("S", text))
        prompts.append(client.prompt)
    assert prompts[0] == prompts[2] != prompts[1]


async def test_instructions_are_those_of_the_request_alone(client: Client, writer: TurnWriter) -> None:
    root = await client.ask(asks("one", instructions="Old."), writer.turn("R", "root"))
    await client.ask(asks("two", previous_response_id=root["id"]), writer.turn())
    text = bytes(token for token in client.prompt if token < 256).decode()
    assert "Old." not in text and "root" in text
    await client.ask(asks("two", previous_response_id=root["id"], instructions="New."), writer.turn())
    assert "New." in bytes(token for token in client.prompt if token < 256).decode()


@pytest.mark.parametrize("settings_key", ["store", "include"])
async def test_a_client_that_returns_encrypted_content_only_gets_its_thinking_back(
    client: Client, writer: TurnWriter, settings_key: str
) -> None:
    asked = {"store": False} if settings_key == "store" else {"include": ["reasoning.encrypted_content"]}
    ids = writer.turn("deep thought", "Hi")
    response = await client.ask(asks(**asked), ids)
    prompt = client.prompt
    reasoning, said = response["output"]
    assert reasoning["encrypted_content"].startswith("k3.")
    # Another head: only the signature can tell that this is the turn.
    returned = [message("user", "Other"), {**reasoning, "content": None, "id": None}, {**said, "id": None}]
    await client.ask(asks([*returned, message("user", "go on")], **asked), writer.turn())
    assert client.headers["x-k3-replay"] == EXACT
    start = len(prompt) - len("Hello") + len("Other")
    assert client.prompt[start : start + len(ids)] == ids


async def test_one_session_of_both_protocols_has_the_ids_of_either(
    client: Client, gateway: Running, writer: TurnWriter
) -> None:
    ids = writer.turn("R", "I look.", (CALL,))
    await client.ask(asks("Weather in Oslo?", tools=[FLAT_TOOL]), ids)
    by_responses = client.prompt
    answer = await gateway.ask(chat_with_tool())
    assert client.prompt == by_responses
    said = answer["choices"][0]["message"]
    (call,) = said["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    sent = {"model": MODEL, "tools": [WEATHER_TOOL]}
    question = {"role": "user", "content": "Weather in Oslo?"}
    await gateway.ask({**sent, "messages": [question, said, result]})
    by_chat = client.prompt
    assert by_chat[: len(by_responses) + len(ids)] == by_responses + ids
    items = [
        question,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
        message("assistant", "I look."),
        {"type": "function_call", "call_id": call["id"], **call["function"]},
        output(call["id"], "rain"),
    ]
    await client.ask(asks(items, tools=[FLAT_TOOL]), writer.turn())
    assert client.prompt == by_chat and client.headers["x-k3-replay"] == EXACT


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
