"""Stop strings: found on visible text only, wherever the pieces are cut, and the engine is told."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.engine.types import Finish
from agent_runtime.gateway.choice import Choice
from agent_runtime.gateway.stops import StopFinder
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Segment
from tests.gateway.bodies import MODEL, chat, chat_with_tool, streamed
from tests.gateway.conftest import Running
from tests.gateway.responses_items import FLAT_TOOL, asks, events_of
from tests.gateway.stub_engine import Script, StubEngine, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258


@settings(deadline=None)
@given(
    text=st.text("ab.", max_size=40),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3),
    data=st.data(),
)
def test_what_is_shown_does_not_depend_on_how_text_arrives(text: str, stops: list[str], data: Any) -> None:
    finder = StopFinder(stops)
    shown, rest = "", text
    while rest:
        length = data.draw(st.integers(1, len(rest)))
        shown += finder.feed(rest[:length])
        assert not any(stop in shown for stop in stops)
        rest = rest[length:]
    shown += finder.finish()
    places = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert shown == (text[: min(places)[1]] if places else text)
    assert (finder.found is not None) == bool(places)


def test_of_stops_that_end_together_the_longest_is_found() -> None:
    finder = StopFinder(["END", "the END"])
    assert finder.feed("see the ENDING") == "see "
    assert finder.found == "the END"


async def test_a_stop_string_ends_the_answer_and_aborts_the_engine(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    ids = writer.turn("STOP is only thought here", "one STOP two", end=False)
    stub.plan = lambda body: Script([[token] for token in ids], None)
    choice = (await gateway.ask(chat(stop=["STOP", "never"])))["choices"][0]
    assert choice["message"]["content"] == "one "
    assert choice["message"]["reasoning_content"] == "STOP is only thought here"
    assert choice["finish_reason"] == "stop"
    assert stub.aborts == [stub.requests[0]["rid"]]
    assert "stop" not in stub.requests[0]["sampling_params"]


async def test_a_stream_never_shows_a_part_of_the_stop_string(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda body: says(writer.turn("", "one ST STOP"), end_of_msg=END_OF_MSG)
    response = await gateway.client.post("/v1/chat/completions", json=streamed(chat(stop="STOP")))
    pieces = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    content = "".join(c["delta"].get("content", "") for piece in pieces for c in piece["choices"])
    assert content == "one ST "


async def test_text_held_back_for_a_stop_string_is_shown_before_a_call(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    call = ("get_weather", (("city", "string", "STOP"),))
    stub.plan = lambda body: says(writer.turn("", "look: ST", (call,)), end_of_msg=END_OF_MSG)
    choice = (await gateway.ask(chat_with_tool(stop="STOP")))["choices"][0]
    assert choice["message"]["content"] == "look: ST"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "STOP"}'
    assert choice["finish_reason"] == "tool_calls"


async def test_a_call_before_a_stop_string_is_a_call_in_every_protocol_streamed_or_not(
    gateway: Running, stub: StubEngine, writer: TurnWriter, tokenizer: K3Tokenizer
) -> None:
    call = ("get_weather", (("city", "string", "Oslo"),))
    again = tokenizer.encode_segments([Segment("<|open|>response<|sep|>", True), Segment("so STOP and")])
    ids = [*writer.turn("", "I look. ", (call,), end=False), *again]
    stub.plan = lambda body: Script([ids], None)
    choice = (await gateway.ask(chat_with_tool(stop="STOP")))["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and len(choice["message"]["tool_calls"]) == 1
    response = await gateway.client.post("/v1/chat/completions", json=streamed(chat_with_tool(stop="STOP")))
    assert '"finish_reason":"tool_calls"' in response.text.replace(": ", ":")
    for stream in (False, True):
        body = {**asks(tools=[FLAT_TOOL], stream=stream), "stop": "STOP"}
        answer = await gateway.client.post("/v1/responses", json=body)
        whole = events_of(answer.text)[-1]["response"] if stream else answer.json()
        assert "function_call" in [item["type"] for item in whole["output"]], stream
        tool = {"name": "get_weather", "input_schema": {"type": "object"}}
        body = {"model": MODEL, "max_tokens": 99, "messages": [{"role": "user", "content": "Oslo?"}], "tools": [tool]}
        answer = await gateway.client.post("/v1/messages", json={**body, "stop_sequences": ["STOP"], "stream": stream})
        assert '"stop_reason":"tool_use","stop_sequence":null' in answer.text.replace(": ", ":").replace(", ", ",")


@pytest.mark.parametrize("stop", ["", [""], ["x"] * 17, ["x" * 257], 5])
async def test_unusable_stop_strings_are_refused(offline: Running, stop: Any) -> None:
    error = (await offline.ask(chat(stop=stop), 400))["error"]
    assert error["param"].startswith("stop") and error["code"] == "invalid_value"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("between", "shown"),
    [
        ("<|close|>response<|sep|><|open|>response<|sep|>", "one STOP two"),  # the channel is opened again
        ("<|sep|>", "one STOP two"),  # a marker that delimits nothing
        ("", "one "),
    ],
)
def test_a_stop_string_is_not_found_across_a_structural_token(
    tokenizer: K3Tokenizer, writer: TurnWriter, between: str, shown: str, size: int
) -> None:
    choice = Choice(tokenizer, "response", calls_allowed=False, stops=("STOP",))
    ids = [*writer.text("one ST"), *tokenizer.encode_segments([Segment(between, True)]), *writer.text("OP two")]
    for begin in range(0, len(ids), size):
        choice.feed(ids[begin : begin + size])
    _, delivered = choice.finish(Finish(type="length", matched=None))
    assert delivered.message.content == shown
