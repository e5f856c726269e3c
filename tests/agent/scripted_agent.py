"""Tools and a whole run against a scripted endpoint."""

import asyncio
from collections.abc import Sequence

from scripted_endpoint import Endpoint, Reply, serve

from agent_runtime.engine.openai_chat import ChatClient
from agent_runtime.events import (
    Event,
    RunResult,
)
from agent_runtime.loop import Agent, Limits
from agent_runtime.tools.registry import Tool, ToolRegistry, tool


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: Another.
    """
    return a + b


@tool
async def hangs() -> str:
    """Never returns."""
    await asyncio.Event().wait()
    return ""


async def run(
    *script: Reply,
    tools: Sequence[Tool] = (add,),
    limits: Limits | None = None,
    events: list[Event] | None = None,
    task: str = "go",
) -> tuple[RunResult, Endpoint, Agent]:
    seen: list[Event] = [] if events is None else events
    with serve(*script) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            agent = Agent(client, ToolRegistry(tools), "be good", limits=limits)
            result = await agent.run(task, on_event=seen.append)
    return result, endpoint, agent


def tool_texts(endpoint: Endpoint, request: int = -1) -> list[str]:
    """What the model read in the tool messages of one request."""
    return [m["content"] for m in endpoint.requests[request]["messages"] if m["role"] == "tool"]
