"""Pydantic AI: an agent with one tool, its message history carried to the second question."""

from __future__ import annotations

import task
from pydantic_ai import Agent, capture_run_messages
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

REQUESTS = 8


def main():
    """Both questions in one history."""
    provider = OpenAIProvider(base_url=f"{task.URL}/v1", api_key=task.KEY)
    agent = Agent(
        OpenAIChatModel(task.MODEL, provider=provider),
        instructions=task.SYSTEM,
        tools=[task.forecast],
        model_settings={"max_tokens": task.MAX_TOKENS},
        retries=REQUESTS,
    )
    history: list[ModelMessage] = []
    for question in (task.FIRST, task.SECOND):
        with capture_run_messages() as captured:
            try:
                result = agent.run_sync(
                    question, message_history=history, usage_limits=UsageLimits(request_limit=REQUESTS)
                )
                history = result.all_messages()
            except UsageLimitExceeded:
                history = list(captured)
    task.report()


main()
