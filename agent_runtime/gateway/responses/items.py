"""Items of a Responses conversation to chat messages: the items of one assistant turn become its one message."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NoReturn

from agent_runtime.gateway.responses.item_ids import turn_of
from agent_runtime.gateway.responses.parts import parts_of, text_of
from agent_runtime.ledger.signatures import is_own_signature
from k3_sglang.chat.json_types import is_list, is_object
from k3_sglang.chat.request_fields import optional_text, refuse, refuse_unknown, required_object, shown, wrong_type
from k3_sglang.chat.request_messages import SIGNATURE

Item = dict[str, Any]

ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output", "item_reference")
REFUSED_ITEMS: Mapping[str, str] = {
    "custom_tool_call": "K3 writes a call as named arguments, free text has no form there; declare a function",
    "custom_tool_call_output": "there are no custom tool calls here; declare a function",
    "compaction": "it is encrypted by the server that made it, and nothing here can read it; send the items themselves",
    "mcp_list_tools": "the gateway connects to no MCP server; run MCP in the client and send its tools as functions",
    "mcp_call": "the gateway connects to no MCP server; send the call as function_call and function_call_output",
    "mcp_approval_request": "the gateway connects to no MCP server",
    "mcp_approval_response": "the gateway connects to no MCP server",
}
_HOSTED_ITEM = "tools that a provider runs do not exist here; send the call as function_call and function_call_output"
_ROLES = ("user", "system", "developer", "assistant")
_MESSAGE_KEYS = frozenset(("type", "id", "role", "content", "status"))
_OUTPUT_KEYS = frozenset(("type", "id", "call_id", "name", "namespace", "output", "status"))


class _Stage(IntEnum):
    """What of a turn has been said; a turn says them in this order."""

    REASONING = 0
    TEXT = 1
    CALLS = 2


@dataclass(slots=True)
class _Turn:
    """An assistant message that grows. ``answered`` once a result of one of its calls has come."""

    message: dict[str, Any]
    token: str | None
    stage: _Stage
    answered: bool = False


@dataclass(slots=True)
class History:
    """Chat messages, and for each the index of the first item it was made of."""

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    items: list[int] = field(default_factory=list[int])
    _turn: _Turn | None = None

    def add(self, item: Item, index: int, param: str) -> None:
        """Take one more item, which stands at ``param``. Raises ChatRequestError."""
        kind = item_type(item, param)
        if kind == "message":
            self._message(item, index, param)
        elif kind == "reasoning":
            self._reasoning(item, index, param)
        elif kind == "function_call":
            self._call(item, index, param)
        elif kind == "function_call_output":
            self._result(item, index, param)
        else:
            refuse_item(kind, param)

    def _message(self, item: Item, index: int, param: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            refuse(f"{param}.role", "unknown_role", f"got {shown(role)}; allowed are {', '.join(_ROLES)}")
        if role == "assistant":
            text = text_of(item.get("content"), f"{param}.content")
            message = self._turn_for(item, _Stage.TEXT, index).message
            message["content"] = (message["content"] or "") + text
            return
        refuse_unknown(item, _MESSAGE_KEYS, param, f"a {role} message")
        self._append({"role": role, "content": parts_of(item.get("content"), f"{param}.content")}, index)

    def _reasoning(self, item: Item, index: int, param: str) -> None:
        thinking = reasoning_text(item, param)
        signature = optional_text(item, "encrypted_content", param)
        message = self._turn_for(item, _Stage.REASONING, index).message
        if thinking:
            message["reasoning_content"] = message.get("reasoning_content", "") + thinking
        if signature and is_own_signature(signature):
            message[SIGNATURE] = signature

    def _call(self, item: Item, index: int, param: str) -> None:
        for key in ("call_id", "name", "arguments"):
            if not isinstance(item.get(key), str):
                wrong_type(f"{param}.{key}", item.get(key), "a string")
        if item.get("namespace") is not None:
            refuse(f"{param}.namespace", "unsupported_field", f"got {shown(item['namespace'])}; tools have plain names")
        if item.get("status") == "incomplete":
            return  # cut or malformed: it was never a call, and the turn on record is without it
        call = {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        self._turn_for(item, _Stage.CALLS, index).message.setdefault("tool_calls", []).append(call)

    def _result(self, item: Item, index: int, param: str) -> None:
        refuse_unknown(item, _OUTPUT_KEYS, param, "a function_call_output")
        call_id = item.get("call_id")
        for key in ("name", "namespace"):  # beside a call_id they repeat those of the call
            if not isinstance(item.get(key), str | None):
                wrong_type(f"{param}.{key}", item[key], f"the {key} of the function that was called")
        content = parts_of(item.get("output"), f"{param}.output")
        if call_id is None and item.get("name"):
            # What a function of the client's own says without a call of the model, as Codex's `agent.goal_objective`.
            self._append({"role": "developer", "content": content}, index)
            return
        if not isinstance(call_id, str):
            wrong_type(f"{param}.call_id", call_id, "the call_id of the function_call")
        turn = self._turn
        self._append({"role": "tool", "tool_call_id": call_id, "content": content}, index)
        if turn is not None:
            # Clients put a result right behind its call; calls of the same turn may still come.
            turn.answered = True
            self._turn = turn

    def _turn_for(self, item: Item, stage: _Stage, index: int) -> _Turn:
        """The turn an item belongs to: that of its id, or else the last one, as long as the order of a turn allows."""
        token = turn_of(item.get("id"))
        turn = self._turn
        if turn is None or not _belongs(turn, token, stage):
            turn = _Turn({"role": "assistant", "content": None}, token, stage)
            self._append(turn.message, index)
            self._turn = turn
        turn.stage = max(turn.stage, stage)
        turn.token = turn.token or token
        return turn

    def _append(self, message: dict[str, Any], index: int) -> None:
        self.messages.append(message)
        self.items.append(index)
        self._turn = None


def _belongs(turn: _Turn, token: str | None, stage: _Stage) -> bool:
    if token is not None and turn.token is not None:
        return token == turn.token
    if turn.answered or stage < turn.stage:
        return False
    return stage > turn.stage or stage != _Stage.TEXT


def item_type(item: Item, param: str) -> str:
    """Type of an item; one with a role and no type is a message. Raises ChatRequestError."""
    kind = item.get("type")
    if kind is None and "role" in item:
        return "message"
    if not isinstance(kind, str):
        wrong_type(f"{param}.type", kind, f"one of {', '.join(ITEM_TYPES)}")
    return kind


def refuse_item(kind: str, param: str) -> NoReturn:
    """Refuse an item by the name of its type."""
    reason = REFUSED_ITEMS.get(kind)
    if reason is None:
        hosted = kind.endswith(("_call", "_call_output"))
        reason = f"{_HOSTED_ITEM}. Accepted" if hosted else "accepted"
        reason = f"{reason} are {', '.join(ITEM_TYPES)}"
    refuse(f"{param}.type", "unsupported_item", f"got {shown(kind)}; {reason}")


def reasoning_text(item: Item, param: str) -> str:
    """The thinking of a reasoning item; its summary where it has no content (other servers deliver only that)."""
    content = _texts(item.get("content"), "reasoning_text", f"{param}.content")
    summary = _texts(item.get("summary"), "summary_text", f"{param}.summary")
    own = item.get("encrypted_content")
    if content or (isinstance(own, str) and is_own_signature(own)):
        return content
    return summary


def _texts(value: Any, kind: str, param: str) -> str:
    if value is None:
        return ""
    if not is_list(value):
        wrong_type(param, value, f"a list of {kind} parts")
    texts: list[str] = []
    for position, part in enumerate(value):
        part = required_object(part, f"{param}[{position}]")
        if part.get("type") != kind or not isinstance(part.get("text"), str):
            wrong_type(f"{param}[{position}]", part, f'{{"type": "{kind}", "text": "..."}}')
        texts.append(part["text"])
    return "".join(texts)


def input_items(value: Any, param: str = "input") -> list[Item]:
    """The items of ``input``; a string is one user message. Raises ChatRequestError."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not is_list(value):
        wrong_type(param, value, "a string or a list of items")
    for position, item in enumerate(value):
        if not is_object(item):
            wrong_type(f"{param}[{position}]", item, "an item object")
    return list(value)
