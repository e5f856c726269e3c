"""A session's history: the window the model sees, and the run log to which everything goes first."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

from agent_runtime.conversation import AssistantTurn, Conversation, Message, ToolCall, to_wire
from agent_runtime.model import CallOptions
from agent_runtime.runstore import RunStore
from agent_runtime.tools.result import ToolResult

VERSION: Final = 1
Purpose: TypeAlias = Literal["step", "summary"]


@dataclass(frozen=True, slots=True)
class Window:
    """One stretch of a history between two compressions: what the runtime put in, and what it left out."""

    number: int = 0
    synthetic: frozenset[int] = frozenset()
    """Positions of messages that the runtime wrote: a summary, a note about what was left out."""
    elided_tokens: int = 0
    """Tokens of user messages left out so far."""


class History:
    """The messages of a session, append-only within a window; a new window is a named event.

    Every change is in the log before it is in memory, so a process that is killed can be continued from the log alone
    (`agent_runtime.resume`), and the log alone gives every request again (`agent_runtime.replay`).
    """

    def __init__(
        self,
        store: RunStore,
        conversation: Conversation,
        window: Window | None = None,
        *,
        session: str,
        logged_messages: int = 0,
        call_ids: frozenset[str] = frozenset(),
    ) -> None:
        """For a session that is in `store` already; `begin` starts one."""
        self._store = store
        self._conversation = conversation
        self._window = window or Window()
        self._logged = logged_messages
        self._call_ids = set(call_ids)
        self.session = session

    @classmethod
    def begin(
        cls,
        store: RunStore,
        tools: Sequence[Mapping[str, Any]],
        messages: Sequence[Message] = (),
        session: str | None = None,
    ) -> History:
        """Start a session in an empty store, with messages that are there from the beginning."""
        name = session or uuid.uuid4().hex
        store.append({"kind": "open", "version": VERSION, "session": name, "tools": list(tools)})
        history = cls(store, Conversation(), session=name)
        for message in messages:
            history.append(message)
        return history

    @property
    def conversation(self) -> Conversation:
        """What the model sees now."""
        return self._conversation

    @property
    def window(self) -> Window:
        """Which window that is."""
        return self._window

    @property
    def store(self) -> RunStore:
        """Where everything is logged."""
        return self._store

    @property
    def logged_messages(self) -> int:
        """Messages of the whole session, those of earlier windows included; they are numbered from 1."""
        return self._logged

    @property
    def call_ids(self) -> frozenset[str]:
        """Every call id of the session, those of earlier windows included."""
        return frozenset(self._call_ids)

    def append(self, message: Message, turn: AssistantTurn | None = None) -> None:
        """Add a message; with the turn it came from, if the model wrote it.

        Raises:
            ConversationError: it does not continue the history; nothing was logged.
            OSError: it could not be logged; the history is unchanged.
        """
        self._append("message", message, {} if turn is None else {"turn": _turn_facts(turn)})

    def replace(self, messages: Sequence[Message], window: Window) -> None:
        """Go on in a new window.

        Raises:
            ConversationError: the messages do not continue each other; nothing was changed.
        """
        conversation = Conversation(messages)
        self._store.append(
            {
                "kind": "window",
                "number": window.number,
                "messages": conversation.wire(),
                "synthetic": sorted(window.synthetic),
                "elided_tokens": window.elided_tokens,
            }
        )
        self._conversation, self._window = conversation, window

    def request(
        self,
        purpose: Purpose,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        options: CallOptions,
    ) -> None:
        """Log a request that is about to be sent: what it adds to a start of the window, and a hash of its bytes."""
        same = common_len(self._conversation.messages, messages)
        self._store.append(
            {
                "kind": "request",
                "purpose": purpose,
                "messages": same,
                "added": [to_wire(message) for message in messages[same:]],
                "options": options.logged(),
                "digest": request_digest([to_wire(message) for message in messages], tools, options.logged()),
            }
        )

    def run_begins(self, task: Message) -> None:
        """Add the message that begins a run; raises as `append` does."""
        self._append("run", task, {})

    def run_ends(self, status: str) -> None:
        """The run that began last is over."""
        self._store.append({"kind": "end", "status": status})

    def step_ends(self, record: Mapping[str, Any], elapsed_s: float, status: str | None) -> None:
        """A step is complete; with the status of the run, when it ends with this step."""
        self._store.append({"kind": "step", "record": dict(record), "elapsed_s": elapsed_s, "status": status})

    def discarded(self, turn: AssistantTurn, reason: str) -> None:
        """An answer that is not kept; it stays readable in the log."""
        self._store.append(
            {"kind": "discarded", "reason": reason, "message": to_wire(turn.message()), "turn": _turn_facts(turn)}
        )

    def interrupted(self, reasoning: str, content: str, reason: str) -> None:
        """An answer that broke off, with what had arrived of it."""
        entry = {"kind": "partial", "reason": reason, "reasoning": reasoning, "content": content}
        self._store.append(entry)

    def call_started(self, call: ToolCall) -> None:
        """A call's function is about to be called: from here on it may have taken effect."""
        self._store.append({"kind": "started", "call": call.id})

    def call_refused(self, call: ToolCall) -> None:
        """The call was not run because it repeats itself."""
        self._store.append({"kind": "refused", "call": call.id})

    def call_ended(self, call: ToolCall, result: ToolResult, *, changes_state: bool) -> None:
        """A call's own result, before the loop adds notes to it."""
        entry = {"kind": "result", "call": call.id, "changes_state": changes_state, "result": asdict(result)}
        self._store.append(entry)

    def summary_call(self, facts: Mapping[str, Any]) -> None:
        """One model call of a compression and what it came to."""
        self._store.append({"kind": "summary", **facts})

    def _append(self, kind: str, message: Message, more: Mapping[str, Any]) -> None:
        self._conversation.check(message)
        self._store.append({"kind": kind, "message": to_wire(message), **more})
        self._conversation.append(message)
        self._call_ids.update(call.id for call in message.tool_calls)
        self._logged += 1


def request_digest(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> str:
    """Hash of what shapes a prompt: history, declarations and options, in the bytes they are sent in."""
    body = {"messages": messages, "tools": list(tools), "options": options}
    return hashlib.sha256(json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()


def common_len(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Messages that both begin with."""
    both = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))


def _turn_facts(turn: AssistantTurn) -> dict[str, Any]:
    return {
        "finish_reason": turn.finish_reason,
        "usage": None if turn.usage is None else asdict(turn.usage),
        "ttft_s": turn.ttft_s,
        "duration_s": turn.duration_s,
    }
