"""Compress a history: one summary call over the cached prefix, bounded retries, then a new window."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias

from agent_runtime.compression.count import ContextMeter
from agent_runtime.compression.plan import NothingToCompress, Plan, make_plan
from agent_runtime.compression.prompts import elision_note, instruction, recovery_pointer, summary_message
from agent_runtime.compression.trigger import CompressionSettings, Pace, clamp_output
from agent_runtime.conversation import AssistantTurn, Message, Usage
from agent_runtime.engine.chat_errors import (
    ChatError,
    ChatProtocolError,
    ContextOverflow,
    EndpointFailed,
    StreamBroken,
)
from agent_runtime.events import CompressionFinished, CompressionStarted, Emit
from agent_runtime.history import History, Window, common_len
from agent_runtime.model import CallOptions, ModelClient, PrefixHints
from agent_runtime.tracing import span

OutcomeKind: TypeAlias = Literal["compressed", "nothing", "failed"]
_FRACTIONS: Final = (1.0, 0.7, 0.5, 0.35)
"""Parts of the history to summarise, one after the other, while the endpoint says that it does not fit."""
_LEAST_SUMMARY_TOKENS: Final = 1024
_MARGIN_TOKENS: Final = 256
"""For the markers around the instruction and the block that forbids calls."""


@dataclass(slots=True)
class _Attempt:
    """A compression that is going on."""

    before_tokens: int | None
    fraction: int = 0
    """Position in `_FRACTIONS`."""
    shorter: bool = False
    problems: list[str] = field(default_factory=list[str])
    usage: list[Usage] = field(default_factory=list[Usage])
    calls: int = 0
    failures: int = 0

    def too_long(self, problem: str) -> str:
        """Summarise a shorter start of the history next; gives up when there is none."""
        self.fraction += 1
        self.problems.append(f"given up, {problem}" if self.fraction == len(_FRACTIONS) else problem)
        return self.problems[-1]


class Compressor:
    """Compresses the history of one session. One compression at a time; a second caller gets the first one's result.

    Nothing of the history changes before a usable summary is there. What was appended meanwhile is carried over, calls
    in flight too. A cancelled compression leaves everything as it was.
    """

    def __init__(
        self,
        client: ModelClient,
        history: History,
        meter: ContextMeter,
        settings: CompressionSettings,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        attachments: Callable[[], Sequence[str]] = lambda: (),
        recovery_tool: str | None = None,
    ) -> None:
        """
        Args:
            tools: the declarations that the session's requests carry.
            attachments: texts that every new window gets, for example an open plan.
            recovery_tool: name of a tool that reads the run log, if the model has one.
        """
        self._client = client
        self._history = history
        self._meter = meter
        self._settings = settings
        self._tools = tools
        self._attachments = attachments
        self._recovery_tool = recovery_tool
        self._pace = Pace(settings)
        self._lock = asyncio.Lock()

    @property
    def settings(self) -> CompressionSettings:
        """When and how."""
        return self._settings

    def context_tokens(self) -> int | None:
        """Tokens of the next prompt, exactly; None when they are not known."""
        return self._meter.count(self._history.conversation.messages, self._tools)

    async def compress_if_due(self, emit: Emit) -> CompressionFinished | None:
        """Compress when the next prompt reaches the trigger; None when it does not."""
        count = self.context_tokens()
        return await self._single_flight(emit, count) if self._pace.due(count) else None

    async def compress(self, emit: Emit = lambda _: None) -> CompressionFinished:
        """Compress now, whatever the size: on request, or because the endpoint said that the window is full."""
        return await self._single_flight(emit, self.context_tokens())

    async def _single_flight(self, emit: Emit, count: int | None) -> CompressionFinished:
        window = self._history.window.number
        async with self._lock:
            if self._history.window.number != window:
                return CompressionFinished("compressed", "done by another caller", 0, count, self.context_tokens(), ())
            emit(CompressionStarted(count, self._settings.trigger))
            with span("compression", before_tokens=count) as traced:
                finished = await self._compress(_Attempt(count))
                traced.set(outcome=finished.outcome, calls=finished.calls, after_tokens=finished.after_tokens)
            emit(finished)
            return finished

    async def _compress(self, attempt: _Attempt) -> CompressionFinished:
        while attempt.calls < self._settings.max_calls:
            messages = self._history.conversation.messages
            plan = self._plan(messages, _FRACTIONS[attempt.fraction])
            if isinstance(plan, NothingToCompress):
                return self._nothing(attempt, plan)
            room = self._room(messages[: plan.seen])
            if room is not None and room < min(_LEAST_SUMMARY_TOKENS, self._settings.summary_tokens):
                attempt.too_long(f"the window leaves {room} tokens for a summary")
                turn = None
            else:
                turn = await self._call(attempt, messages[: plan.seen], room)
            if turn is not None:
                before = self._history.conversation.messages
                finished = self._commit(attempt, plan, turn.content)
                await self._tell_cache(before)
                return finished
            if attempt.problems[-1].startswith("given up"):
                break
        self._pace.failed(attempt.before_tokens)
        return self._finished(attempt, "failed", None, "; ".join(attempt.problems))

    def _plan(self, messages: Sequence[Message], fraction: float) -> Plan | NothingToCompress:
        synthetic = self._history.window.synthetic
        return make_plan(messages, synthetic, self._settings, self._meter.text_tokens, fraction=fraction)

    def _nothing(self, attempt: _Attempt, found: NothingToCompress) -> CompressionFinished:
        if attempt.calls:  # a part of the history was too long for the window already
            self._pace.failed(attempt.before_tokens)
            return self._finished(attempt, "failed", None, "; ".join([*attempt.problems, found.reason]))
        self._pace.failed(attempt.before_tokens, counts=False)
        head = self._meter.count([m for m in self._history.conversation.messages if m.role == "system"], self._tools)
        sizes = f"next prompt {attempt.before_tokens} tokens, system text and tools {head}"
        return self._finished(
            attempt, "nothing", attempt.before_tokens, f"{found.reason}; {sizes}, trigger {self._settings.trigger}"
        )

    def _room(self, seen: Sequence[Message]) -> int | None:
        """Output tokens a summary of these messages may have; None for no limit."""
        count = self._meter.count(seen, self._tools)
        if count is not None:
            count += self._meter.text_tokens(instruction(shorter=True)) + _MARGIN_TOKENS
        window = self._settings.window_tokens
        if count is not None and window is not None and count >= window:
            return 0
        return clamp_output(self._settings.summary_tokens, count, window)

    async def _call(self, attempt: _Attempt, seen: Sequence[Message], room: int | None) -> AssistantTurn | None:
        """One summary call; None when it gave no summary, and `attempt` says why and what to do differently."""
        attempt.calls += 1
        messages = (*seen, Message(role="user", content=instruction(shorter=attempt.shorter)))
        choice = "none" if self._tools else None
        options = CallOptions(max_output_tokens=room, tool_choice=choice, session=self._history.session)
        self._history.request("summary", messages, self._tools, options)
        turn = None
        try:
            turn = await self._client.complete(messages, self._tools, options=options)
            problem = _problem(turn)
            attempt.shorter = turn.finish_reason == "length"
        except ContextOverflow as error:
            problem = attempt.too_long(f"the history does not fit: {error}")
        except (StreamBroken, EndpointFailed, ChatProtocolError) as error:
            problem = f"the endpoint failed: {error}"
            attempt.failures += 1
        except ChatError as error:
            problem = f"given up, the endpoint refused: {error}"
        return await self._judge(attempt, turn, problem)

    async def _judge(self, attempt: _Attempt, turn: AssistantTurn | None, problem: str | None) -> AssistantTurn | None:
        usage = None if turn is None else turn.usage
        if usage is not None:
            attempt.usage.append(usage)
        self._history.summary_call({"problem": problem, "usage": None if usage is None else asdict(usage)})
        if problem is None:
            return turn
        if turn is not None and not turn.empty:
            self._history.discarded(turn, f"summary: {problem}")
        if problem not in attempt.problems[-1:]:
            attempt.problems.append(problem)
        if turn is None and attempt.failures and attempt.calls < self._settings.max_calls:
            await asyncio.sleep(self._settings.backoff_s * 2 ** (attempt.failures - 1))
        return None

    def _commit(self, attempt: _Attempt, plan: Plan, summary: str) -> CompressionFinished:
        """The new window: what the plan keeps, the summary, and everything from the tail on, appended since or not."""
        history = self._history
        messages = history.conversation.messages
        pointer = ""
        if self._recovery_tool is not None:
            gone = history.logged_messages - (len(messages) - plan.tail)
            pointer = recovery_pointer(gone, self._recovery_tool)
        head = [messages[index] for index in plan.system]
        users = [Message(role="user", content=text) for text in plan.users]
        elided = history.window.elided_tokens + plan.elided_tokens
        synthetic: list[int] = []
        if elided:
            place = min(plan.elided_after, len(users))
            users.insert(place, Message(role="user", content=elision_note(elided)))
            synthetic.append(len(head) + place)
        synthetic.append(len(head) + len(users))
        note = Message(role="user", content=summary_message(summary, self._attachments(), pointer))
        history.replace(
            (*head, *users, note, *messages[plan.tail :]),
            Window(history.window.number + 1, frozenset(synthetic), elided),
        )
        self._meter.reset()
        after = self.context_tokens()
        self._pace.succeeded(after)
        return self._finished(attempt, "compressed", after, f"window {history.window.number}")

    async def _tell_cache(self, before: Sequence[Message]) -> None:
        """Which prefix died: everything behind the messages that both windows begin with."""
        if isinstance(self._client, PrefixHints):
            messages = self._history.conversation.messages
            kept = self._meter.fork().count(messages[: common_len(before, messages)], self._tools)
            await self._client.abandon(self._history.session, kept or 0)

    def _finished(self, attempt: _Attempt, outcome: OutcomeKind, after: int | None, reason: str) -> CompressionFinished:
        return CompressionFinished(outcome, reason, attempt.calls, attempt.before_tokens, after, tuple(attempt.usage))


def _problem(turn: AssistantTurn) -> str | None:
    """Why an answer is no summary; None when it is one."""
    if turn.finish_reason not in ("stop", "tool_calls"):
        return f"the summary was cut off ({turn.finish_reason})"
    if turn.tool_calls:
        return "the model called a tool instead of writing a summary"
    return None if turn.content.strip() else "the summary was empty"
