"""An agent for programs without an event loop."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from agent_runtime.engine.openai_chat import ChatClient
from agent_runtime.events import Emit, RunResult
from agent_runtime.loop import Agent


class SyncAgent:
    """An agent and its client on one event loop for all runs; Ctrl-C cancels the current run.

    Use as a context manager; leaving it closes the client.
    """

    def __init__(self, agent: Agent, client: ChatClient) -> None:
        self.agent = agent
        self._client = client
        self._runner = asyncio.Runner()

    def __enter__(self) -> SyncAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def run(self, task: str, *, output: type[BaseModel] | None = None, on_event: Emit = lambda _: None) -> RunResult:
        """`Agent.run`, blocking."""
        return self._runner.run(self.agent.run(task, output=output, on_event=on_event))

    def proceed(self, *, output: type[BaseModel] | None = None, on_event: Emit = lambda _: None) -> RunResult:
        """`Agent.proceed`, blocking."""
        return self._runner.run(self.agent.proceed(output=output, on_event=on_event))
