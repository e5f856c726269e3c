"""The Messages API over HTTP: answers, the order of stream events, counts and errors."""

import asyncio
from typing import Any

import pytest

from tests.gateway.bodies import MODEL, chat
from tests.gateway.conftest import Running
from tests.gateway.messages import (
    IMAGE,
    MARK,
    WEATHER,
    Json,
    ask,
    assembled,
    events,
    parsed,
    post,
    result,
    text,
    with_call,
)
from tests.gateway.stub_engine import Script, StubEngine, cut, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258
OSLO = (("city", "string", "Oslo"), ("days", "number", "3"))
CALL = ("get_weather", OSLO)


@pytest.fixture
def settings(settings: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    """With what a test changes by `with_settings`."""
    return {**settings, **getattr(request, "param", {})}


def with_settings(**changed: Any) -> pytest.MarkDecorator:
    """Have a test's gateway run with these."""
    return pytest.mark.parametrize("settings", [changed], indirect=True, ids=["changed"])


async def test_an_answer_is_a_message(gateway: Running, stub: StubEngine, writer: TurnWriter) -> None:
    ids = writer.turn("Think", "I look.", (CALL, CALL))
    stub.plan = lambda body: says(ids, end_of_msg=END_OF_MSG, cached_tokens=7)
    answer = await post(gateway, ask(tools=[WEATHER]))
    thinking, prose, first, second = answer["content"]
    assert thinking["type"] == "thinking" and thinking["thinking"] == "Think"
    assert thinking["signature"].startswith("k3.")
    assert prose == {"type": "text", "text": "I look."}
    assert first == {"type": "tool_use", "id": first["id"], "name": "get_weather", "input": {"city": "Oslo", "days": 3}}
    assert second["id"] != first["id"]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    usage, prompt_len = answer["usage"], len(stub.requests[-1]["input_ids"])
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt_len
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (7, 0)
    assert usage["output_tokens"] == len(ids)
    assert usage["output_tokens_details"] == {"thinking_tokens": 5}
    assert answer["k3"]["replay"]["verdict"] == "new"


async def test_a_stream_has_its_events_in_the_order_of_the_api(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda body: says(writer.turn("T", "Hi", (CALL,)), end_of_msg=END_OF_MSG, piece=1000)
    stream = await events(gateway, ask(tools=[WEATHER]))
    found = [(event["type"], event.get("delta", {}).get("type")) for event in stream]
    order = list(dict.fromkeys(found))
    assert order == [
        ("message_start", None),
        ("content_block_start", None),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "signature_delta"),
        ("content_block_stop", None),
        ("content_block_delta", "text_delta"),
        ("content_block_delta", "input_json_delta"),
        ("message_delta", None),
        ("message_stop", None),
    ]
    starts = [event["content_block"] for event in stream if event["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["thinking", "text", "tool_use"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[2]["input"] == {} and starts[2]["id"].startswith("call_")
    assert stream[0]["message"]["content"] == [] and stream[0]["message"]["stop_reason"] is None
    assert stream[0]["message"]["usage"]["input_tokens"] == len(stub.requests[-1]["input_ids"])
    assert stream[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("piece", [1, 3, 1000])
async def test_streamed_and_whole_answers_agree(
    gateway: Running, stub: StubEngine, writer: TurnWriter, piece: int
) -> None:
    ids = writer.turn("Überlegt 🙂", "Ja: 你好\u2028!", (CALL, ("get_weather", ())))
    stub.plan = lambda body: says(ids, end_of_msg=END_OF_MSG, piece=piece, cached_tokens=9)
    body = ask(tools=[WEATHER], context_management={"edits": []})
    whole, streamed = await post(gateway, body), assembled(await events(gateway, body))
    for answer in (whole, streamed):
        assert answer["context_management"] == {"applied_edits": []}
        answer["id"] = answer["content"][0]["signature"] = ""
        for block in answer["content"][2:]:
            block["id"] = ""
    assert streamed == whole


@pytest.mark.parametrize(
    ("script", "fields", "reason", "sequence"),
    [
        (("Hi", ()), {}, "end_turn", None),
        (("Hi", (CALL,)), {}, "tool_use", None),
        (("Hi STOP you", ()), {"stop_sequences": ["STOP"]}, "stop_sequence", "STOP"),
        (None, {}, "max_tokens", None),
    ],
)
async def test_every_stop_reason(
    gateway: Running,
    stub: StubEngine,
    writer: TurnWriter,
    script: tuple[str, Any] | None,
    fields: Json,
    reason: str,
    sequence: str | None,
) -> None:
    def plan(body: Json) -> Script:
        if script is None:
            return cut(writer.turn("T", "long", end=False))
        return says(writer.turn("T", script[0], script[1]), end_of_msg=END_OF_MSG)

    stub.plan = plan
    body = ask(tools=[WEATHER], **fields)
    for answer in (await post(gateway, body), assembled(await events(gateway, body))):
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
        if sequence:
            assert answer["content"][1]["text"] == "Hi "


async def test_a_cut_call_is_left_out_and_named(gateway: Running, stub: StubEngine, writer: TurnWriter) -> None:
    ids = writer.turn("T", "x", (CALL,))
    stub.plan = lambda body: cut(ids[: ids.index(ord("O")) + 2])
    answer = await post(gateway, ask(tools=[WEATHER]))
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert answer["stop_reason"] == "max_tokens"
    assert answer["k3"]["incomplete_tool_calls"][0]["name"] == "get_weather"
    stream = await events(gateway, ask(tools=[WEATHER]))
    written = "".join(event["delta"].get("partial_json", "") for event in stream if "delta" in event)
    assert written and not written.endswith("}")
    assert stream[-2]["k3"]["incomplete_tool_calls"][0]["name"] == "get_weather"


async def test_thinking_that_is_to_be_left_out_goes_out_as_its_signature(gateway: Running) -> None:
    body = ask(thinking={"type": "adaptive", "display": "omitted"})
    stream = await events(gateway, body)
    assert not any(event.get("delta", {}).get("type") == "thinking_delta" for event in stream)
    for answer in (await post(gateway, body), assembled(stream)):
        assert answer["content"][0]["thinking"] == ""
        assert answer["content"][0]["signature"].startswith("k3.")


@with_settings(keep_alive_s=0.05)
async def test_a_silent_stream_is_pinged(gateway: Running, stub: StubEngine, writer: TurnWriter) -> None:
    seen = asyncio.Event()
    ids = writer.turn("T", "Hi")
    stub.plan = lambda body: Script([seen.wait, ids], {"type": "stop", "matched": END_OF_MSG})
    received = ""
    async with gateway.client.stream("POST", "/v1/messages", json=ask(stream=True)) as response:
        async for piece in response.aiter_text():
            received += piece
            if "ping" in received:
                seen.set()
    found = parsed(received)
    assert found[0] == {"type": "ping"} and found[-1] == {"type": "message_stop"}


@pytest.fixture
async def stub(stub: StubEngine) -> StubEngine:
    """With the cache that takes hints."""
    stub.cache_backend = "k3"
    return stub


async def test_what_was_marked_and_computed_counts_as_written(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda body: says(writer.turn("T", "Hi"), end_of_msg=END_OF_MSG, cached_tokens=10)
    system = [text("a" * 50, cache_control={**MARK, "ttl": "1h"}), text("b" * 20, cache_control=MARK)]
    usage = (await post(gateway, ask(system=system)))["usage"]
    parts = usage["cache_creation"]
    assert parts["ephemeral_1h_input_tokens"] > 40 and parts["ephemeral_5m_input_tokens"] >= 20
    assert usage["cache_creation_input_tokens"] == sum(parts.values())
    assert usage["cache_read_input_tokens"] == 10
    prompt_len = len(stub.requests[-1]["input_ids"])
    assert usage["input_tokens"] + usage["cache_creation_input_tokens"] + 10 == prompt_len


async def test_counting_gives_what_the_request_would_have(gateway: Running, stub: StubEngine) -> None:
    body = with_call(result("toolu_1", "rain"), system="Be short.", tool_choice={"type": "any"})
    asked = {key: value for key, value in body.items() if key != "max_tokens"}
    counted = await post(gateway, asked, path="/v1/messages/count_tokens")
    assert stub.requests == []
    usage = (await post(gateway, body))["usage"]
    assert counted == {"input_tokens": usage["input_tokens"]} == {"input_tokens": len(stub.requests[-1]["input_ids"])}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_errors_have_the_envelope_of_the_api(offline: Running, path: str) -> None:
    async def refused(status: int, kind: str, **sent: Any) -> Json:
        response = await offline.client.request(**{"method": "POST", "url": path, **sent})
        assert response.status_code == status, response.text
        body = response.json()
        assert body["type"] == "error" and body["error"]["type"] == kind
        assert body["request_id"] == response.headers["request-id"]
        return body

    body = await refused(400, "invalid_request_error", json=ask(surprise=1))
    assert body["k3"] == {"code": "unsupported_field", "param": "surprise"}
    await refused(400, "invalid_request_error", content=b"{")
    await refused(404, "not_found_error", json=ask(model="other"))
    await refused(405, "invalid_request_error", method="GET")
    await refused(400, "invalid_request_error", json=ask(), headers={"anthropic-version": "2020-01-01"})
    await refused(404, "not_found_error", url=f"{path}/nowhere")


@with_settings(max_body_bytes=100)
async def test_too_large_a_body_is_413(offline: Running) -> None:
    error = (await post(offline, ask("x" * 200), 413))["error"]
    assert error["type"] == "request_too_large"


async def test_faults_that_the_chat_format_finds_have_the_clients_own_places(offline: Running) -> None:
    unanswered = with_call(result("toolu_2", "rain"), system=[text("a")])
    error = await post(offline, unanswered, 400)
    assert error["error"]["message"].startswith("messages.2.content.0.tool_call_id")
    unnamed = await post(offline, ask(tools=[{**WEATHER, "name": "no name"}]), 400)
    assert unnamed["k3"]["param"] == "tools[0].name"
    unstopped = await post(offline, ask(stop_sequences=[""]), 400)
    assert unstopped["k3"]["param"].startswith("stop_sequences")
    blind = await post(offline, ask([text("See"), IMAGE], system="a"), 400)
    assert "messages.0.content.1" in blind["error"]["message"]


@with_settings(context_len=100)
async def test_a_prompt_without_room_is_said_so_that_clients_compact(offline: Running) -> None:
    error = (await post(offline, ask("x" * 200), 400))["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: ") and error["message"].endswith(" tokens > 99 maximum")


async def test_an_engine_that_is_not_there_is_an_overload(offline: Running) -> None:
    error = await post(offline, ask(), 529)
    assert error["error"]["type"] == "overloaded_error"


async def test_a_failure_in_mid_stream_is_an_error_event(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda body: Script([writer.turn("Thinking", end=False)[:4]], {"type": "abort", "message": "died"})
    response = await gateway.client.post("/v1/messages", json=ask(stream=True))
    *_, last = parsed(response.text)
    assert response.status_code == 200
    assert last["type"] == "error" and last["error"]["type"] == "api_error"


async def test_a_client_that_leaves_aborts_the_engine(gateway: Running, stub: StubEngine, writer: TurnWriter) -> None:
    stub.plan = lambda body: Script([writer.turn("T", "Hi", end=False)], None)
    async with gateway.client.stream("POST", "/v1/messages", json=ask(stream=True)) as response:
        async for piece in response.aiter_text():
            if "text_delta" in piece:
                break
    await stub.until(lambda engine: len(engine.aborts) == 1 and not engine.running)


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21"])
async def test_both_versions_of_the_api_are_served(gateway: Running, version: str) -> None:
    headers = {"anthropic-version": version, "anthropic-beta": "context-management-2025-06-27"}
    body = ask(temperature=0.5, top_p=0.9, top_k=5)
    assert (await gateway.client.post("/v1/messages", json=body, headers=headers)).status_code == 200
    models = (await gateway.client.get("/v1/models", headers=headers)).json()
    assert models["first_id"] == models["last_id"] == models["data"][0]["id"] == MODEL
    one = (await gateway.client.get(f"/v1/models/{MODEL}", headers=headers)).json()
    assert one == models["data"][0] and one["max_input_tokens"] == 100_000
    missing = await gateway.client.get("/v1/models/other", headers=headers)
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"


async def test_chat_completions_are_as_they_were(gateway: Running) -> None:
    answer = await gateway.ask(chat())
    assert set(answer["choices"][0]["message"]) == {"role", "content", "reasoning_content"}
