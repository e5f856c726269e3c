"""The Responses API driven by the unmodified `openai` package."""

import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import ResponseStreamEvent

from tests.gateway.bodies import MODEL
from tests.gateway.responses_items import FLAT_TOOL, output
from tests.gateway.stub_engine import Script, StubEngine, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258
CALL = ("get_weather", (("city", "string", "Oslo"), ("days", "number", "3")))
STRICT: Any = {**FLAT_TOOL, "strict": True}


@pytest.fixture
def outputs(stub: StubEngine, writer: TurnWriter) -> list[list[int]]:
    """The engine first calls the tool, then answers; returns the two outputs."""
    made = [writer.turn("I need it", "", (CALL,)), writer.turn("Got it", "Rain.")]
    stub.plan = lambda body: says(made[len(stub.requests) - 1], end_of_msg=END_OF_MSG, piece=2)
    return made


async def test_a_tool_session_whose_items_are_sent_back(
    client: AsyncOpenAI, stub: StubEngine, outputs: list[list[int]]
) -> None:
    history: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
    first = await client.responses.create(model=MODEL, input=history, tools=[STRICT], store=False)
    call = next(item for item in first.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"city": "Oslo", "days": 3}
    history += [*(item.model_dump() for item in first.output), output(call.call_id, "rain")]
    raw = await client.responses.with_raw_response.create(model=MODEL, input=history, tools=[STRICT], store=False)
    assert raw.headers["x-k3-replay"] == "exact; exact=1; repaired=0; missing=0; foreign=0"
    assert raw.parse().output_text == "Rain."
    before, after = (request["input_ids"] for request in stub.requests)
    assert after[: len(before) + len(outputs[0])] == before + outputs[0]


async def test_a_tool_session_of_streams_continued_by_id(
    client: AsyncOpenAI, stub: StubEngine, outputs: list[list[int]]
) -> None:
    async with client.responses.stream(model=MODEL, input="Weather in Oslo?", tools=[STRICT]) as stream:
        first = await stream.get_final_response()
    assert first.usage is not None and first.usage.output_tokens == len(outputs[0])
    call = next(item for item in first.output if item.type == "function_call")
    thinking = next(item for item in first.output if item.type == "reasoning")
    assert thinking.content is not None and thinking.content[0].text == "I need it"
    assert call.parsed_arguments == {"city": "Oslo", "days": 3}
    result: list[Any] = [output(call.call_id, "rain")]
    async with client.responses.stream(
        model=MODEL,
        input=result,
        tools=[STRICT],
        previous_response_id=first.id,
    ) as stream:
        text = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        second = await stream.get_final_response()
    assert "".join(text) == second.output_text == "Rain."
    before, after = (request["input_ids"] for request in stub.requests)
    assert after[: len(before) + len(outputs[0])] == before + outputs[0]


async def test_stored_responses_are_retrieved_listed_cancelled_and_deleted(
    client: AsyncOpenAI, stub: StubEngine, writer: TurnWriter
) -> None:
    made = await client.responses.create(model=MODEL, input="Hello")
    assert await client.responses.retrieve(made.id) == made
    shown = await client.responses.retrieve(made.id, include=["reasoning.encrypted_content"])
    assert shown.output[0].type == "reasoning" and shown.output[0].encrypted_content is not None
    items = [item async for item in client.responses.input_items.list(made.id)]
    assert [item.type for item in items] == ["message"]
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        await client.responses.retrieve(made.id)
    stub.plan = lambda body: Script([], None)
    running = await client.responses.create(model=MODEL, input="Hello", background=True)
    assert running.status == "in_progress"
    await stub.until(lambda engine: bool(engine.running))
    cancelled = await client.responses.cancel(running.id)
    assert cancelled.status == "cancelled"
    await stub.until(lambda engine: not engine.running)


async def test_a_stream_whose_response_is_deleted_ends_and_the_engine_is_told(
    client: AsyncOpenAI, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda body: Script([writer.text("think")], None)
    events: list[ResponseStreamEvent] = []
    async for event in await client.responses.create(model=MODEL, input="x", stream=True):
        events.append(event)
        if event.type == "response.reasoning_text.delta":
            assert events[0].type == "response.created"
            await client.responses.delete(events[0].response.id)
    assert event.type == "response.failed" and event.response.error is not None
    assert "deleted" in event.response.error.message and event.response.error.code == "server_error"
    assert event.response.output[0].type == "reasoning", "what there was by then"
    await stub.until(lambda engine: len(engine.aborts) == 1 and not engine.running)
    with pytest.raises(openai.NotFoundError, match="not found"):
        await client.responses.retrieve(event.response.id)


async def test_failures_become_the_clients_own_exceptions(
    client: AsyncOpenAI, stub: StubEngine, writer: TurnWriter
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=MODEL, input="x", truncation="auto")
    assert refused.value.param == "truncation"
    stub.plan = lambda body: Script([writer.text("think"), ConnectionError("died")], None)
    kinds = [event.type async for event in await client.responses.create(model=MODEL, input="x", stream=True)]
    assert kinds[-1] == "response.failed"


async def test_raw_completions_are_readable(client: AsyncOpenAI, stub: StubEngine, writer: TurnWriter) -> None:
    stub.plan = lambda body: says(writer.text("world"), end_of_msg=END_OF_MSG)
    made = await client.completions.create(model=MODEL, prompt="Hello ", max_tokens=9)
    assert made.choices[0].text == "world" and stub.requests[-1]["input_ids"] == list(b"Hello ")
