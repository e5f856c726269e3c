"""The agent on the real engine: exact counts, a compression over the cached prefix, and SGLang's own endpoint."""

from __future__ import annotations

import pytest

from agent_runtime.compression.count import EncoderMeter
from agent_runtime.compression.trigger import CompressionSettings
from agent_runtime.engine.openai_chat import ChatClient, ChatSettings
from agent_runtime.events import CompressionFinished, Event, StepFinished, StepStarted
from agent_runtime.limits import Limits, Retries
from agent_runtime.loop import Agent, AgentOptions
from agent_runtime.replay import replay
from agent_runtime.tools.registry import ToolRegistry, tool
from k3_sglang.chat.encode import encode_ids
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, Message
from k3_sglang.tiny.checkpoint import ensure
from tests.engine.stack import Engine, Stack
from tests.engine.test_gateway import MAX_TOKENS

SYSTEM = "You look after a garden. " * 20
GRID = 64
"""Tokens between two places where the engine keeps a recurrent state."""


@tool
async def look(where: str) -> str:
    """Looks.

    Args:
        where: Where.
    """
    return f"nothing at {where}"


REGISTRY = ToolRegistry([look])
SETTINGS = ChatSettings("tiny", MAX_TOKENS)


@pytest.fixture
def tokenizer() -> K3Tokenizer:
    """The tokenizer of the served model."""
    return K3Tokenizer.from_dir(ensure())


async def test_an_agent_counts_exactly_and_compresses_over_the_cached_prefix(
    stack: Stack, engine: Engine, tokenizer: K3Tokenizer
) -> None:
    events: list[Event] = []
    counted: list[int | None] = []
    meter = EncoderMeter(tokenizer)
    settings = CompressionSettings(2500, user_tokens=300, user_head_tokens=100, summary_tokens=MAX_TOKENS)
    async with ChatClient(f"{stack.gateway_url}/v1", settings=SETTINGS) as client:
        agent = Agent(
            client,
            REGISTRY,
            SYSTEM,
            meter=meter,
            limits=Limits(max_steps=4, retries=Retries(unusable=0)),
            options=AgentOptions(settings),
        )

        def watch(event: Event) -> None:
            events.append(event)
            if isinstance(event, StepStarted):
                counted.append(meter.count(agent.conversation.messages, agent.tools))

        while agent.history.window.number == 0 and len(counted) < 60:
            await agent.run(f"Water bed {len(counted)}. " * 20, on_event=watch)
        after = len([event for event in events if isinstance(event, StepFinished)])
        await agent.run("Go on.", on_event=watch)
    steps = [event.record for event in events if isinstance(event, StepFinished)]
    assert counted == [step.prompt_tokens for step in steps], "every prompt, to the token"
    assert all(request.exact for request in replay(agent.history.store.entries()))
    done = next(e for e in events if isinstance(e, CompressionFinished) and e.outcome == "compressed")
    assert done.before_tokens is not None and done.before_tokens >= 2500 > (done.after_tokens or 0)
    usage = done.summary_usage[-1]
    assert usage.cached_tokens is not None and usage.cached_tokens >= done.before_tokens - 2 * GRID - MAX_TOKENS
    declared = tuple(dict(t) for t in agent.tools)
    head = ChatRequest((Message(role="system", content=SYSTEM),), declared, add_generation_prompt=False)
    head_tokens = len(encode_ids(head, tokenizer))
    first = steps[after - 1] if after else steps[0]
    assert first.cached_tokens is not None and first.cached_tokens >= head_tokens - head_tokens % GRID - GRID


async def test_the_same_agent_runs_on_sglangs_own_endpoint(stack: Stack, engine: Engine) -> None:
    async with ChatClient(f"{stack.engine_url}/v1", settings=ChatSettings(None, 40)) as client:
        agent = Agent(client, REGISTRY, SYSTEM, limits=Limits(max_steps=2, retries=Retries(unusable=0)))
        first = await agent.run("Water the beds.")
        second = await agent.run("Go on.")
    assert first.steps and second.steps
    assert second.steps[0].prompt_tokens is not None and first.steps[0].prompt_tokens is not None
    assert second.steps[0].prompt_tokens > first.steps[0].prompt_tokens
    assert all(request.exact for request in replay(agent.history.store.entries()))
