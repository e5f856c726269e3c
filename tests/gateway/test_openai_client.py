"""The gateway driven by the unmodified `openai` package: whole and streamed, with a tool, over several turns."""

import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.gateway.bodies import MODEL, WEATHER_TOOL, user
from tests.gateway.stub_engine import Script, StubEngine, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258
CALL = ("get_weather", (("city", "string", "Oslo"), ("days", "number", "3")))


@pytest.fixture
def tool_session(stub: StubEngine, writer: TurnWriter) -> list[list[int]]:
    """The engine first calls the tool, then answers; returns the two outputs."""
    outputs = [writer.turn("I need it", "", (CALL,)), writer.turn("Got it", "Rain.")]

    def plan(body: dict[str, Any]) -> Script:
        return says(outputs[len(stub.requests) - 1], end_of_msg=END_OF_MSG, piece=2)

    stub.plan = plan
    return outputs


async def test_a_tool_session_of_whole_answers(
    client: AsyncOpenAI, stub: StubEngine, tool_session: list[list[int]]
) -> None:
    messages: list[Any] = [user("Weather in Oslo?")]
    tool: Any = WEATHER_TOOL
    first = await client.chat.completions.create(model=MODEL, messages=messages, tools=[tool])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.model_extra is not None and message.model_extra["reasoning_content"] == "I need it"
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function" and json.loads(call.function.arguments) == {"city": "Oslo", "days": 3}

    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    second = await client.chat.completions.create(model=MODEL, messages=messages, tools=[tool])
    assert second.choices[0].message.content == "Rain."
    before, after = (request["input_ids"] for request in stub.requests)
    assert after[: len(before) + len(tool_session[0])] == before + tool_session[0]
    assert second.usage is not None and second.usage.prompt_tokens == len(after)
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.completion_tokens_details is not None
    assert second.usage.completion_tokens_details.reasoning_tokens == len("Got it")


async def test_a_tool_session_of_streams(client: AsyncOpenAI, stub: StubEngine, tool_session: list[list[int]]) -> None:
    messages: list[Any] = [user("Weather in Oslo?")]
    # The package's own accumulator takes strict tools only.
    strict: Any = {"type": "function", "function": {**WEATHER_TOOL["function"], "strict": True}}
    async with client.chat.completions.stream(
        model=MODEL, messages=messages, tools=[strict], stream_options={"include_usage": True}
    ) as stream:
        first = await stream.get_final_completion()
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.usage is not None and first.usage.completion_tokens == len(tool_session[0])
    assert message.model_extra is not None and message.model_extra["reasoning_content"] == "I need it"
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo", "days": 3}

    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    messages += [message.model_dump(), result]
    response = await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, tools=[strict], stream=True
    )
    assert response.headers["x-k3-replay"] == "exact; exact=1; repaired=0; missing=0; foreign=0"
    content = [chunk.choices[0].delta.content or "" async for chunk in response.parse() if chunk.choices]
    assert "".join(content) == "Rain."
    before, after = (request["input_ids"] for request in stub.requests)
    assert after[: len(before) + len(tool_session[0])] == before + tool_session[0]


async def test_failures_become_the_clients_own_exceptions(
    client: AsyncOpenAI, stub: StubEngine, writer: TurnWriter
) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], logprobs=True)
    assert refused.value.param == "logprobs"
    stub.plan = lambda body: Script([writer.text("think"), ConnectionError("died")], None)
    stream = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True)
    with pytest.raises(openai.APIError, match="engine is not available"):
        async for _ in stream:
            pass


async def test_the_model_list_is_readable(client: AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
