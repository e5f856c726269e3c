"""Input that means harm or nothing at all is refused before the engine hears of it, and never echoed without bound."""

import json
import time
from typing import Any

import pytest

from tests.gateway.bodies import chat, streamed
from tests.gateway.conftest import Running
from tests.gateway.stub_engine import Script, StubEngine, cut, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258
LONG = "x" * 100_000


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": "kimi-k3", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        json.dumps(chat("hi")).encode("utf-16"),
        json.dumps(chat("hi")).replace("hi", "\\ud800").encode("utf-16-le"),
        json.dumps(chat("hi")).encode("utf-32"),
    ],
    ids=["surrogate as bytes", "utf-16", "surrogate in utf-16", "utf-32"],
)
async def test_a_body_that_is_not_strict_utf8_is_refused(offline: Running, raw: bytes) -> None:
    response = await offline.client.post("/v1/chat/completions", content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


async def test_a_byte_order_mark_is_no_fault(gateway: Running) -> None:
    raw = b"\xef\xbb\xbf" + json.dumps(chat()).encode()
    assert (await gateway.client.post("/v1/chat/completions", content=raw)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": 10**30}, "top_k"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ],
)
async def test_numbers_that_would_end_the_engine_are_refused(
    offline: Running, fields: dict[str, Any], param: str
) -> None:
    error = (await offline.ask(chat(**fields), 400))["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    "body",
    [
        {**chat(), LONG: 1},
        {**chat(), **{f"field_{number}": 1 for number in range(5000)}},
        chat(model=LONG),
        chat(logit_bias={LONG: 1}),
        chat(logit_bias={str(number): 101 for number in range(5000)}),
        chat(metadata={LONG: 1}),
        {**chat(), "messages": [{"role": "user", "content": "x", LONG: 1}]},
        {**chat(), "messages": [{"role": LONG, "content": "x"}]},
    ],
    ids=["name", "many names", "model", "key", "many keys", "nested key", "message key", "role"],
)
async def test_an_error_does_not_echo_what_was_sent_without_bound(offline: Running, body: dict[str, Any]) -> None:
    status = 404 if body["model"] == LONG else 400
    assert len(json.dumps(await offline.ask(body, status))) < 4000


async def test_a_small_schema_with_endless_alternatives_does_not_hold_up_the_server(
    gateway: Running, stub: StubEngine
) -> None:
    """Thirty levels, each twice the next: a billion alternatives in two kilobytes."""
    levels = {f"a{level}": {"anyOf": [{"$ref": f"#/$defs/a{level + 1}"}] * 2} for level in range(30)}
    schema = {"$defs": {**levels, "a30": {"type": "string"}}, "$ref": "#/$defs/a0"}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    began_s = time.process_time()
    await gateway.ask(chat(response_format=wanted))
    assert time.process_time() - began_s < 20, "a billion alternatives would take hours"
    assert "structural_tag" in stub.requests[0]["sampling_params"]


async def test_no_event_holds_a_character_that_some_clients_take_for_a_line_end(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    text = "a\u2028b\u2029c\x85d\re"
    stub.plan = lambda _: says(writer.turn("", text), end_of_msg=END_OF_MSG)
    response = await gateway.client.post("/v1/chat/completions", json=streamed(chat()))
    lines = [line for line in response.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    deltas = [choice["delta"].get("content", "") for event in events for choice in event["choices"]]
    assert "".join(deltas) == text


async def test_a_cut_call_with_opaque_arguments_never_adds_up_to_valid_arguments(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    special = {"open": 259, "close": 260, "sep": 261}

    def tag(kind: str, text: str) -> list[int]:
        return [special[kind], *writer.text(text), special["sep"]]

    ids = [*writer.turn("", "", end=False), *tag("open", "tools"), *tag("open", 'call tool="f" index="1"')]
    ids += [*tag("open", 'json type="object"'), *writer.text('{"a": 1}'), *tag("close", "json")]
    stub.plan = lambda _: cut(ids)
    body = chat(tools=[{"type": "function", "function": {"name": "f"}}])
    response = await gateway.client.post("/v1/chat/completions", json=streamed(body))
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    calls = [call for event in events for c in event["choices"] for call in c["delta"].get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "f"
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads("".join(call["function"]["arguments"] for call in calls))


@pytest.mark.parametrize("stream", [False, True])
async def test_arguments_with_half_a_surrogate_pair_and_a_repeated_key_reach_the_client(
    gateway: Running, stub: StubEngine, writer: TurnWriter, stream: bool
) -> None:
    value = '{"s": "\\ud800", "k": 1, "k": 2}'
    ids = writer.turn("", "", (("f", (("v", "object", value),)),))
    stub.plan = lambda _: says(ids, end_of_msg=END_OF_MSG)
    body = chat(tools=[{"type": "function", "function": {"name": "f"}}])
    response = await gateway.client.post("/v1/chat/completions", json=streamed(body) if stream else body)
    assert response.status_code == 200 and "error" not in response.text
    assert "\\\\ud800" in response.text


async def test_an_engine_that_says_nothing_but_the_end_gives_an_empty_answer(
    gateway: Running, stub: StubEngine
) -> None:
    stub.plan = lambda _: Script([], {"type": "stop", "matched": END_OF_MSG})
    answer = await gateway.ask(chat())
    assert answer["choices"][0]["message"]["content"] == ""
