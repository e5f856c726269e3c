"""OpenAI's Agents SDK with a session: ``chat`` or ``responses`` chooses the model class; both stream."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import openai
import task
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
MAX_TURNS = 8


async def ask(agent, session, question):
    """One question: turns until an answer is no call, or the limit."""
    result = Runner.run_streamed(agent, question, session=session, max_turns=MAX_TURNS)
    with contextlib.suppress(MaxTurnsExceeded):
        async for _ in result.stream_events():
            pass


async def main():
    """Both questions in one session."""
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{task.URL}/v1", api_key=task.KEY, max_retries=0)
    agent = Agent(
        name="weather",
        instructions=task.SYSTEM,
        model=MODELS[sys.argv[1]](model=task.MODEL, openai_client=client),
        model_settings=ModelSettings(tool_choice="required", max_tokens=task.MAX_TOKENS),
        tools=[function_tool(task.forecast)],
    )
    session = SQLiteSession("weather")
    for question in (task.FIRST, task.SECOND):
        await ask(agent, session, question)
    task.report()


asyncio.run(main())
