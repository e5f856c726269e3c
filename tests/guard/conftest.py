"""Fixtures of the guard tests: a guard, and sessions that are told and sent back without a server."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from agent_runtime.guard.history import Scope
from agent_runtime.guard.prompt import HistoryGuard, ReplayedPrompt
from agent_runtime.guard.repair import Mode
from agent_runtime.ledger.call_ids import new_call_id
from agent_runtime.ledger.turns import TurnIndex
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, JSONObject, Message, ToolCall
from tests.gateway.vocabulary import TurnWriter, byte_tokenizer

TOOL: JSONObject = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
END_OF_MSG = 258


def call(arguments: str = '{"path": "a"}', name: str = "read") -> ToolCall:
    """A call with an id of its own."""
    return ToolCall(new_call_id(), name, arguments)


@dataclass
class Talk:
    """One session as it really went; `send` shows the guard any version of its history."""

    guard: HistoryGuard
    tokenizer: K3Tokenizer
    numbers: itertools.count
    name: str = ""
    tools: tuple[JSONObject, ...] = (TOOL,)
    messages: list[Message] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)

    def send(self, messages: list[Message] | None = None, **fields: object) -> ReplayedPrompt:
        """What the guard makes of a history, by default the true one."""
        request = ChatRequest(tuple(self.messages if messages is None else messages), self.tools)
        return self.guard.build(replace(request, **fields), Scope(self.name, bool(self.name)), self.tokenizer)

    def says(
        self, reasoning: str, content: str = "", calls: tuple[ToolCall, ...] = (), *, sent: list[Message] | None = None
    ) -> Message:
        """The model answers the history as sent; the turn goes on record, and results of its calls into the history."""
        built = self.send(sent)
        turn = Message("assistant", content, reasoning, calls)
        number = next(self.numbers)
        ids = (*TurnWriter(self.tokenizer).text(f"output {number}"), END_OF_MSG)
        self.guard.record(built, number, 1, turn, ids, whole=True)
        self.messages.append(turn)
        self.outputs.append(ids)
        self.messages += [Message("tool", "result", tool_call_id=made.id, name=made.name) for made in calls]
        return turn

    def asks(self, text: str) -> None:
        """The user speaks."""
        self.messages.append(Message("user", text))

    def without_thinking(self) -> list[Message]:
        """The history as most clients send it."""
        return [replace(message, reasoning=None) for message in self.messages]


@pytest.fixture
def guard() -> HistoryGuard:
    """A guard in its default mode."""
    return HistoryGuard(TurnIndex(100_000, 1000))


@pytest.fixture
def talk(guard: HistoryGuard) -> Callable[..., Talk]:
    """Starts sessions: `talk(name, guard=..., mode=...)`."""
    numbers = itertools.count(1)
    tokenizer = byte_tokenizer()

    def start(name: str = "", *, mode: Mode = "repair") -> Talk:
        return Talk(replace(guard, mode=mode), tokenizer, numbers, name)

    return start
