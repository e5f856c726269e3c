"""Assistant messages of a messages request to chat messages: thinking, signature, text and calls."""

from typing import Any

from agent_runtime.gateway.anthropic.blocks import OWN_SIGNATURE, Json, refuse_block, text_of
from k3_sglang.chat.cache_marks import MARK, TTL_S
from k3_sglang.chat.json_types import is_object
from k3_sglang.chat.request_fields import wrong_type
from k3_sglang.chat.request_messages import SIGNATURE


class Turn:
    """One assistant turn, gathered from the blocks of one message or of several in a row.

    Blocks are answers sent back, so fields that they have beside those read here are let through.
    """

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._calls: list[Json] = []
        self._signature = ""
        self._marks: list[Any] = []

    def add(self, block: Json, param: str) -> None:
        """One block. Raises ChatRequestError."""
        kind = block.get("type")
        if kind == "text":
            self._text.append(text_of(block, param))
        elif kind == "thinking":
            self._reasoning.append(text_of(block, param, "thinking"))
            signature = block.get("signature")
            if signature is not None and not isinstance(signature, str):
                wrong_type(f"{param}.signature", signature, "a string")
            if signature and signature.startswith(OWN_SIGNATURE):
                self._signature = self._signature or signature
        elif kind == "tool_use":
            self._calls.append(_call(block, param))
        elif kind != "redacted_thinking":  # thinking of another model that nobody here can read: it is missing
            refuse_block(kind, param, "text, thinking, redacted_thinking and tool_use")
        if block.get(MARK) is not None:
            self._marks.append(block[MARK])

    def message(self) -> Json:
        """The chat message. Thinking in several blocks is one text: the model wrote it without anything between."""
        message: Json = {"role": "assistant", "content": "".join(self._text)}
        reasoning = "".join(self._reasoning)
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        if self._signature:
            message[SIGNATURE] = self._signature
        if self._marks:
            message[MARK] = max(self._marks, key=_seconds)
        return message


def _call(block: Json, param: str) -> Json:
    arguments = block.get("input")
    if not is_object(arguments):
        wrong_type(f"{param}.input", arguments, "an object")
    name, call_id = text_of(block, param, "name"), text_of(block, param, "id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _seconds(mark: Any) -> int:
    """How long a mark keeps; what is no mark goes first, so that it is refused."""
    ttl = mark.get("ttl") or "5m" if is_object(mark) else None
    return TTL_S.get(ttl, 1 << 30) if isinstance(ttl, str) else 1 << 30
