"""One conversation with the endpoint: what the model answers, sent back as it came."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agent_runtime.conversation import AssistantTurn, Message, from_wire
from agent_runtime.engine.openai_chat import ChatClient
from agent_runtime.model import CallOptions

Calls: TypeAlias = list[tuple[str, dict[str, Any] | None]]


@dataclass(slots=True)
class Chat:
    """A conversation of one named session. The gateway knows a turn again only in the session it was written in."""

    client: ChatClient
    session: str
    tools: Sequence[Mapping[str, Any]] = ()
    messages: list[Message] = field(default_factory=list[Message])

    def add(self, wire: Mapping[str, Any]) -> None:
        """A message as a request carries it."""
        self.messages.append(from_wire(dict(wire)))

    async def ask(self, tool_choice: Any = None) -> AssistantTurn:
        """The next answer, which becomes part of the conversation. Raises ChatError."""
        options = CallOptions(tool_choice=tool_choice, session=self.session)
        turn = await self.client.complete(self.messages, self.tools, options=options)
        if not turn.empty:
            self.messages.append(turn.message())
        return turn

    def result(self, turn: AssistantTurn, place: int, text: str) -> None:
        """The result of one of a turn's calls."""
        self.messages.append(Message(role="tool", content=text, tool_call_id=turn.tool_calls[place].id))


def calls(turn: AssistantTurn) -> Calls:
    """Names and arguments of a turn's calls; None for arguments that are not JSON."""
    found: Calls = []
    for call in turn.tool_calls:
        try:
            found.append((call.name, json.loads(call.arguments)))
        except ValueError:
            found.append((call.name, None))
    return found


def written(turn: AssistantTurn) -> str:
    """All that the model wrote in a turn, for comparisons between runs."""
    return json.dumps([turn.reasoning, turn.content, calls(turn)], ensure_ascii=False)
