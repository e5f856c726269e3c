"""The agent: runs steps until an answer, keeps its history in a log, compresses it, and can be stopped and resumed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from agent_runtime.compression.count import ContextMeter, UsageMeter
from agent_runtime.compression.run import Compressor
from agent_runtime.compression.trigger import CompressionSettings
from agent_runtime.conversation import Conversation, Message
from agent_runtime.errors import AgentBusy
from agent_runtime.events import CompressionFinished, Emit, Event, RunResult, RunUsage
from agent_runtime.history import History
from agent_runtime.limits import Limits, Retries
from agent_runtime.model import ModelClient
from agent_runtime.resume import Recovered, check_tools, recover
from agent_runtime.run import Run, RunParts, close_open_calls
from agent_runtime.runstore import MemoryRunStore, RunStore
from agent_runtime.step import RECOVERY_TOOL
from agent_runtime.subagents import running_agent
from agent_runtime.tools.registry import Tool, ToolRegistry
from agent_runtime.tracing import span

__all__ = ["Agent", "AgentOptions", "Limits", "ModelClient", "Retries"]


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What an agent does beside running steps."""

    compression: CompressionSettings | None = field(default_factory=CompressionSettings)
    """When and how the history is compressed; None never compresses it."""
    attachments: Callable[[], Sequence[str]] = lambda: ()
    """Texts put behind each summary: what the program knows exactly, such as an open plan."""
    session: str | None = None
    """Name of the session for log and endpoint; None makes one."""


class Agent:
    """A conversation with a model that has tools.

    The system text and the tool declarations are fixed when the agent is made: they open every prompt, and a
    prompt that changes at its start loses all of its cached prefix. Tools that come later are declared at the end of
    the history (`add_tools`).
    """

    def __init__(
        self,
        client: ModelClient,
        registry: ToolRegistry,
        system: str | None = None,
        *,
        limits: Limits | None = None,
        conversation: Conversation | None = None,
        store: RunStore | None = None,
        meter: ContextMeter | None = None,
        options: AgentOptions | None = None,
    ) -> None:
        """
        Args:
            system: the first message; None for none.
            conversation: a history to carry on with instead, for example one that was saved; excludes
                `system`.
            store: an empty run log; None keeps the log in memory. `Agent.resume` goes on with one that is not empty.
            meter: counts the tokens of the next prompt; None takes what the endpoint reports.
        """
        if conversation is not None and system is not None:
            raise ValueError("give either a system text for a new conversation or a conversation to carry on with")
        store = MemoryRunStore() if store is None else store
        if store.entries():
            raise ValueError("the run log is not empty; go on with it by Agent.resume, or give a new one")
        messages = () if conversation is None else conversation.messages
        if system is not None:
            messages = (Message(role="system", content=system),)
        chosen = options or AgentOptions()
        tools = registry.schemas()
        history = History.begin(store, tools, messages, chosen.session)
        self._assemble(client, registry, tools, history, limits, meter, chosen)

    @classmethod
    def resume(
        cls,
        client: ModelClient,
        registry: ToolRegistry,
        store: RunStore,
        *,
        limits: Limits | None = None,
        meter: ContextMeter | None = None,
        options: AgentOptions | None = None,
    ) -> Agent:
        """The agent of a session that is in a log, as it stood when its process ended, however that was.

        `proceed` goes on with a run that was not finished; `run` begins another one.

        Raises:
            RunLogError: the log cannot be read, or the registry lacks a tool of the session.
        """
        state = recover(store.entries())
        check_tools(state, registry)
        agent = cls.__new__(cls)
        agent._assemble(
            client, registry, state.tools, state.history(store), limits, meter, options or AgentOptions(), state
        )
        messages = state.conversation.messages
        for position, turn in state.answers:
            agent._meter.observe(messages[:position], turn)
            if turn.usage is not None:
                agent._meter.calibrate(messages[:position], state.tools, turn.usage.prompt_tokens)
        return agent

    def _assemble(
        self,
        client: ModelClient,
        registry: ToolRegistry,
        tools: Sequence[Mapping[str, Any]],
        history: History,
        limits: Limits | None,
        meter: ContextMeter | None,
        options: AgentOptions,
        recovered: Recovered | None = None,
    ) -> None:
        self._client = client
        self._registry = registry
        self._tools = tools
        self._history = history
        self._limits = limits or Limits()
        self._meter = meter or UsageMeter()
        self._options = options
        self._recovered = recovered if recovered is not None and recovered.unfinished else None
        self._run: Run | None = None
        self._said: deque[str] = deque()
        self.compressor: Compressor | None = None
        if options.compression is not None:
            self.compressor = Compressor(
                client,
                history,
                self._meter,
                options.compression,
                tools=tools,
                attachments=options.attachments,
                recovery_tool=RECOVERY_TOOL if registry.get(RECOVERY_TOOL) is not None else None,
            )

    @property
    def history(self) -> History:
        """The history with its log."""
        return self._history

    @property
    def conversation(self) -> Conversation:
        """What the model sees now; to be read only."""
        return self._history.conversation

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The declarations that every request carries."""
        return self._tools

    @property
    def running(self) -> bool:
        """Whether a run is going on."""
        return self._run is not None

    def check_task(self, task: str) -> None:
        """Raises ConversationError when `run` would refuse the task."""
        self._history.conversation.check_task(task)

    @property
    def unfinished(self) -> bool:
        """Whether the log holds a run that `proceed` can go on with."""
        return self._recovered is not None

    async def run(
        self, task: str, *, output: type[BaseModel] | None = None, on_event: Emit = lambda _: None
    ) -> RunResult:
        """Give the model a task and go on until it answers without calling a tool, or a limit is reached.

        Args:
            output: a model the final answer must follow; it is then `RunResult.output`.

        Raises:
            ConversationError: `task` is blank.
            ChatError: a model call failed. The history stays valid, and `run` may be called again.
            asyncio.CancelledError: the caller was cancelled; calls that were running have a result that says
            so.
            AgentBusy: the agent is already running.
        """
        self._refuse_second_run()
        self._history.conversation.check_task(task)
        close_open_calls(self._history)
        self._history.run_begins(Message(role="user", content=task))
        self._recovered = None
        return await self._supervised(Run(self._parts(on_event), self._limits), output)

    async def proceed(self, *, output: type[BaseModel] | None = None, on_event: Emit = lambda _: None) -> RunResult:
        """Go on with the run that was not finished when the process of the log ended.

        Results that are in the log are used. A call that was in the middle is made again, unless its tool changes
        things; the model is then told that it may have taken effect. What was used of the limits counts.

        Raises:
            RuntimeError: there is no such run.
            AgentBusy: the agent is already running.
            ChatError, asyncio.CancelledError: as `run`.
        """
        self._refuse_second_run()
        if self._recovered is None:
            raise RuntimeError("the log holds no unfinished run; use run()")
        state, self._recovered = self._recovered, None
        return await self._supervised(Run(self._parts(on_event), self._limits, state), output)

    async def run_stream(self, task: str, *, output: type[BaseModel] | None = None) -> AsyncGenerator[Event, None]:
        """`run` as a stream of events; `RunFinished` is the last. Leaving the loop early cancels the run."""
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        worker = asyncio.create_task(self.run(task, output=output, on_event=events.put_nowait))
        worker.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            await worker
        finally:
            worker.cancel()
            # Not awaited itself: a caller that is cancelled again and again must not cut short how the run ends.
            await asyncio.wait({worker})
            if not worker.cancelled():
                worker.exception()

    def interrupt(self, *, now: bool = False) -> None:
        """End the current run with the status `interrupted`: after the current step, or at once.

        At once means that the stream is closed and running tools are cancelled; the history stays valid. Does nothing
        when no run is going on. Not thread-safe.
        """
        if self._run is not None:
            self._run.interrupt(now=now)

    def say(self, text: str) -> None:
        """Tell the model something while it works: a user message at the next step boundary.

        Raises:
            ConversationError: the text is blank.
        """
        self._history.conversation.check_task(text)
        self._said.append(text)

    def add_tools(self, tools: Iterable[Tool]) -> None:
        """Declare further tools at the end of the history, where they move no prefix; between runs only.

        Raises:
            ToolDefinitionError: a name is taken.
            AgentBusy: a run is going on.
        """
        self._refuse_second_run()
        close_open_calls(self._history)
        added = [self._registry.add(tool).schema for tool in tools]
        if added:
            self._history.append(Message(role="system", tools=tuple(added)))

    def fork(self, *, limits: Limits | None = None, store: RunStore | None = None) -> Agent:
        """Another agent that begins with this one's history up to its last complete step: it shares that prefix.

        The two do not see each other's later messages. Tools are shared.
        """
        messages = list(self.conversation.messages)
        while messages and Conversation(messages).open_calls:
            messages.pop()
        forked = Agent.__new__(Agent)
        history = History.begin(store or MemoryRunStore(), self._tools, messages)
        meter = self._meter.fork()
        forked._assemble(
            self._client, self._registry, self._tools, history, limits or self._limits, meter, self._options
        )
        return forked

    def add_usage(self, usage: RunUsage) -> None:
        """Count tokens that a tool used on behalf of the current run, for its usage and its token budget."""
        if self._run is not None:
            self._run.add_usage(usage)

    async def compress(self, *, on_event: Emit = lambda _: None) -> CompressionFinished:
        """Compress the history now, between runs or while one is going on.

        Raises:
            RuntimeError: the agent was made without compression.
        """
        if self.compressor is None:
            raise RuntimeError("this agent was made without compression; give AgentOptions(compression=...)")
        return await self.compressor.compress(on_event)

    def _parts(self, emit: Emit) -> RunParts:
        return RunParts(
            client=self._client,
            registry=self._registry,
            history=self._history,
            tools=self._tools,
            meter=self._meter,
            compressor=self.compressor,
            said=self._said,
            emit=emit,
        )

    async def _supervised(self, run: Run, output: type[BaseModel] | None) -> RunResult:
        """Run it, one at a time, and make the agent known to the tools it calls."""
        self._run = run
        token = running_agent.set(self)
        try:
            with span("agent_run", session=self._history.session) as traced:
                result = await run.go(output)
                traced.set(status=result.status, steps=len(result.steps))
                return result
        finally:
            running_agent.reset(token)
            self._run = None

    def _refuse_second_run(self) -> None:
        if self._run is not None:
            raise AgentBusy("this agent is already running; a conversation has one turn at a time")
