"""From a run log back to a session that can go on: its window, its limits used so far, its calls in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_runtime.conversation import AssistantTurn, Conversation, Message, ToolCall, Usage, from_wire
from agent_runtime.events import StepRecord, ToolRun
from agent_runtime.history import VERSION, History, Window
from agent_runtime.repeats import RepeatGuard, RepeatLimits
from agent_runtime.runstore import Entry, RunLogError, RunStore
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.result import Failure, ToolResult


@dataclass(slots=True)
class LoggedCall:
    """What the log knows of one call."""

    call: ToolCall
    started: bool = False
    refused: bool = False
    result: ToolResult | None = None
    changes_state: bool = False


@dataclass(slots=True)
class Recovered:
    """A session as its log describes it."""

    session: str
    tools: list[dict[str, Any]]
    """Declarations every request of the session carries."""
    conversation: Conversation = field(default_factory=Conversation)
    window: Window = field(default_factory=Window)
    logged_messages: int = 0
    calls: dict[str, LoggedCall] = field(default_factory=dict[str, LoggedCall])
    """Calls of the whole session in the order they were made."""
    unfinished: bool = False
    """Whether a run had begun and not ended."""
    status: str | None = None
    """How the last run that ended ended."""
    records: list[StepRecord] = field(default_factory=list[StepRecord])
    """Complete steps of the last run."""
    elapsed_s: float = 0.0
    """Seconds the last run had taken when its last step ended."""
    run_calls: list[str] = field(default_factory=list[str])
    """Ids of the calls of the last run, in order."""
    turn: AssistantTurn | None = None
    """The answer of a step that is not complete."""
    answers: list[tuple[int, AssistantTurn]] = field(default_factory=list[tuple[int, AssistantTurn]])
    """Answers of the window with the number of messages before each, for whoever counts tokens."""
    step_calls: list[str] = field(default_factory=list[str])
    """Ids of the calls of a step that is not complete."""

    def history(self, store: RunStore) -> History:
        """The history to go on with; `store` is the one this was read from."""
        return History(
            store,
            self.conversation,
            self.window,
            session=self.session,
            logged_messages=self.logged_messages,
            call_ids=frozenset(self.calls),
        )

    def guard(self, limits: RepeatLimits) -> RepeatGuard:
        """The loop breaker of the last run as it stood before the step that is not complete."""
        guard = RepeatGuard(limits)
        for call_id in self.run_calls:
            known = self.calls[call_id]
            if call_id in self.step_calls:
                break
            if known.refused:
                guard.refusal(known.call)
            elif known.result is not None:
                guard.observe(known.call, known.result, changes_state=known.changes_state)
        return guard


def recover(entries: Sequence[Entry]) -> Recovered:
    """Read a log.

    Raises:
        RunLogError: it is empty, of another version, or its entries do not follow each other.
        ConversationError: its messages do not continue each other.
    """
    if not entries or entries[0]["kind"] != "open":
        raise RunLogError("the run log does not begin with a session; was it ever written to?")
    first = entries[0]
    if first["version"] != VERSION:
        raise RunLogError(f"the run log has version {first['version']}; this program reads version {VERSION}")
    state = Recovered(session=first["session"], tools=list(first["tools"]))
    for number, entry in enumerate(entries[1:], start=2):
        try:
            _apply(state, entry)
        except (KeyError, TypeError, ValueError) as error:
            raise RunLogError(
                f"entry {number} of the run log ({entry.get('kind')}) is incomplete: {error!r}"
            ) from error
    return state


def check_tools(state: Recovered, registry: ToolRegistry) -> None:
    """
    Raises:
        RunLogError: a tool the session declared is missing from the registry or has another declaration. The
            declarations open every prompt; changed ones would be another session.
    """
    dynamic = [tool for message in state.conversation.messages for tool in message.tools or ()]
    for declared in [*state.tools, *dynamic]:
        name = declared["function"]["name"]
        found = registry.get(name)
        if found is None or found.schema != declared:
            what = "is not registered" if found is None else "is declared differently now"
            raise RunLogError(f"tool {name!r} of the session {what}; register it as it was, or start a new session")


def _apply(state: Recovered, entry: Entry) -> None:
    kind = entry["kind"]
    if kind == "message":
        _message(state, from_wire(entry["message"]), entry.get("turn"))
    elif kind == "window":
        state.conversation = Conversation(from_wire(wire) for wire in entry["messages"])
        state.answers = []
        state.window = Window(entry["number"], frozenset(entry["synthetic"]), entry["elided_tokens"])
    elif kind == "run":
        state.unfinished, state.status, state.turn = True, None, None
        state.records, state.elapsed_s, state.run_calls, state.step_calls = [], 0.0, [], []
        _message(state, from_wire(entry["message"]), None)
    elif kind == "end":
        state.unfinished, state.status = False, entry["status"]
    elif kind == "step":
        runs = tuple(_tool_run(state.calls[call_id]) for call_id in state.step_calls)
        facts: dict[str, Any] = {**entry["record"], "faults": tuple(entry["record"]["faults"])}
        state.records.append(StepRecord(**facts, tools=runs))
        state.elapsed_s, state.step_calls, state.turn = entry["elapsed_s"], [], None
        state.unfinished, state.status = entry["status"] is None, entry["status"]
    elif kind == "started":
        state.calls[entry["call"]].started = True
    elif kind == "refused":
        state.calls[entry["call"]].refused = True
    elif kind == "result":
        known = state.calls[entry["call"]]
        known.result = known.result or _result(entry["result"])  # the first one is what happened
        known.changes_state = entry["changes_state"]
    elif kind not in ("request", "discarded", "partial", "summary"):
        raise ValueError(f"unknown kind {kind!r}")


def _message(state: Recovered, message: Message, turn: Mapping[str, Any] | None) -> None:
    state.conversation.append(message)
    state.logged_messages += 1
    if message.role == "assistant":
        state.calls.update({call.id: LoggedCall(call) for call in message.tool_calls})
        state.step_calls = [call.id for call in message.tool_calls]
        state.run_calls += state.step_calls
        state.turn = None if turn is None else _turn(message, turn)
        if state.turn is not None:
            state.answers.append((len(state.conversation) - 1, state.turn))


def _turn(message: Message, facts: Mapping[str, Any]) -> AssistantTurn:
    usage = facts["usage"]
    return AssistantTurn(
        reasoning=message.reasoning or "",
        content=str(message.content or ""),
        tool_calls=message.tool_calls,
        finish_reason=facts["finish_reason"],
        usage=None if usage is None else Usage(**usage),
        ttft_s=facts["ttft_s"],
        duration_s=facts["duration_s"],
    )


def _result(fields: Mapping[str, Any]) -> ToolResult:
    failure = fields["failure"]
    made: dict[str, Any] = {**fields, "failure": None if failure is None else Failure(failure)}
    return ToolResult(**made)


def _tool_run(known: LoggedCall) -> ToolRun:
    not_run = ToolResult("(not run)", failure=Failure.REPEATED if known.refused else Failure.CUT_OFF)
    return ToolRun(known.call, known.result or not_run)
