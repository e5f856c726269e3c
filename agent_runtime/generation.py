"""One usable answer of the model: asked for again, in the same bytes, when it broke off or cannot be used."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agent_runtime.conversation import (
    AssistantTurn,
    ContentDelta,
    Delta,
    Message,
    ReasoningDelta,
    ToolCall,
)
from agent_runtime.engine.chat_errors import ChatError, ChatProtocolError, EndpointFailed, StreamBroken
from agent_runtime.events import computed_tokens
from agent_runtime.faults import Fault, find_fault
from agent_runtime.history import History
from agent_runtime.limits import Retries
from agent_runtime.model import CallOptions, ModelClient
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.result import Failure
from agent_runtime.tracing import span

INTERRUPTED_MARK = "\n\n[interrupted]"


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer, and what it took to get it."""

    turn: AssistantTurn
    sent: tuple[Message, ...]
    """The messages it answers."""
    window: int = 0
    """Number of the window they are from; the history may be in another one when the answer is there."""
    attempts: int = 1
    wasted_tokens: int = 0
    faults: tuple[Fault, ...] = ()
    """Faults of the answers in order; the last is the kept answer's if there are as many as attempts."""
    fault: Fault | None = None
    """What is wrong with the answer all the same."""


@dataclass(slots=True)
class _Arrived:
    """What has come of an answer so far."""

    reasoning: list[str] = field(default_factory=list[str])
    content: list[str] = field(default_factory=list[str])

    def add(self, delta: Delta) -> None:
        if isinstance(delta, ReasoningDelta):
            self.reasoning.append(delta.text)
        elif isinstance(delta, ContentDelta):
            self.content.append(delta.text)


async def generate(
    client: ModelClient,
    history: History,
    registry: ToolRegistry,
    tools: Sequence[Mapping[str, Any]],
    *,
    options: CallOptions,
    retries: Retries,
    on_delta: Callable[[Delta], None],
    on_retry: Callable[[int, str], None],
) -> Generated:
    """One answer to the history, with call ids that are unique in the session.

    The history only changes when the answer is lost for good: text that had arrived is then added as a message with
    the mark `[interrupted]`, so that the model and the user remember the same. Thinking that has no text after it,
    and calls in the making, stay in the log only.

    Args:
        on_retry: told the number of an attempt that is not kept, and why; its deltas no longer count.

    Raises:
        ChatError: the model call failed, after the retries where they may help.
        asyncio.CancelledError: the caller was cancelled.
    """
    sent, window = history.conversation.messages, history.window.number
    failures, wasted, faults = 0, 0, list[Fault]()
    unusable: dict[bool, int] = {False: 0, True: 0}
    attempt = 0
    while True:
        attempt += 1
        try:
            turn = await _call(client, history, sent, tools, options, on_delta, last=failures >= retries.failures)
        except (StreamBroken, EndpointFailed) as error:
            failures += 1
            if failures > retries.failures:
                raise
            on_retry(attempt, str(error))
            asked_s = error.retry_after_s if isinstance(error, EndpointFailed) else None
            await asyncio.sleep(retries.pause_s(failures, asked_s))
            continue
        except ChatProtocolError as error:
            unusable[False] += 1
            if unusable[False] > retries.unusable:
                raise
            on_retry(attempt, str(error))
            continue
        turn = replace(turn, tool_calls=unique_ids(turn.tool_calls, history.call_ids))
        fault = find_fault(turn, registry.names) or _misfired(turn, registry, retries)
        if fault is not None:
            faults.append(fault)
            kind = fault is Fault.MISFIRED
            unusable[kind] += 1
            if unusable[kind] <= (retries.misfires if kind else retries.unusable):
                history.discarded(turn, fault)
                wasted += spent(turn)
                on_retry(attempt, fault)
                continue
        return Generated(turn, sent, window, attempt, wasted, tuple(faults), fault)


def spent(turn: AssistantTurn) -> int:
    """Tokens that had to be computed for an answer."""
    usage = turn.usage
    return 0 if usage is None else computed_tokens(usage.prompt_tokens, usage.extend_tokens, usage.completion_tokens)


async def _call(
    client: ModelClient,
    history: History,
    sent: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    options: CallOptions,
    on_delta: Callable[[Delta], None],
    *,
    last: bool,
) -> AssistantTurn:
    history.request("step", sent, tools, options)
    arrived = _Arrived()

    def received(delta: Delta) -> None:
        arrived.add(delta)
        on_delta(delta)

    with span("model_call", messages=len(sent)) as traced:
        try:
            turn = await client.complete(sent, tools, options=options, on_delta=received)
        except (ChatError, asyncio.CancelledError) as error:
            _keep_partial(history, arrived, error, in_history=last or isinstance(error, asyncio.CancelledError))
            raise
        if turn.usage is not None:
            traced.set(
                prompt_tokens=turn.usage.prompt_tokens,
                cached_tokens=turn.usage.cached_tokens,
                completion_tokens=turn.usage.completion_tokens,
            )
        return turn


def _keep_partial(history: History, arrived: _Arrived, error: BaseException, *, in_history: bool) -> None:
    reasoning, content = (_sendable("".join(pieces)) for pieces in (arrived.reasoning, arrived.content))
    if not (reasoning or content):
        return
    history.interrupted(reasoning, content, str(error) or type(error).__name__)
    if in_history and content.strip():
        history.append(Message(role="assistant", content=content + INTERRUPTED_MARK, reasoning=reasoning))


def _sendable(text: str) -> str:
    """Half of a surrogate pair at the place where a stream broke off has no UTF-8 form."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _misfired(turn: AssistantTurn, registry: ToolRegistry, retries: Retries) -> Fault | None:
    if not retries.misfires or not turn.tool_calls or turn.finish_reason not in ("stop", "tool_calls"):
        return None
    wrong = (Failure.UNKNOWN_TOOL, Failure.BAD_JSON, Failure.INVALID_ARGUMENTS)
    problems = [registry.check(call) for call in turn.tool_calls]
    return Fault.MISFIRED if all(p is not None and p.failure in wrong for p in problems) else None


def unique_ids(calls: Sequence[ToolCall], taken: frozenset[str]) -> tuple[ToolCall, ...]:
    """Replace ids that would mix results up: servers that number the calls of a request repeat them."""
    used = set(taken)
    unique: list[ToolCall] = []
    for call in calls:
        fresh = call if call.id and call.id not in used else replace(call, id=f"call_{uuid.uuid4().hex}")
        used.add(fresh.id)
        unique.append(fresh)
    return tuple(unique)
