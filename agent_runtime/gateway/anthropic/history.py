"""The conversation of a messages request, `system` included, to chat messages."""

from typing import Any

from agent_runtime.gateway.anthropic.blocks import (
    Json,
    blocks_of,
    is_billing_line,
    marked,
    part_of,
    plain,
    refuse_block,
    text_of,
)
from agent_runtime.gateway.anthropic.places import Places
from agent_runtime.gateway.anthropic.tools import Tools, decode_tool
from agent_runtime.gateway.anthropic.turns import Turn
from k3_sglang.chat.cache_marks import MARK
from k3_sglang.chat.json_types import is_list
from k3_sglang.chat.request_fields import refuse, refuse_unknown, required_object, shown, wrong_type

_MESSAGE_KEYS = frozenset(("role", "content"))
_SYSTEM_KEYS = _MESSAGE_KEYS | {"clear_at", "output_config"}
_RESULT_KEYS = frozenset(("type", "tool_use_id", "content", "is_error", MARK))
_CHANGE_KEYS = frozenset(("type", "tool", MARK))
_REFERENCE_KEYS = frozenset(("type", "tool_name", MARK))
_ERROR_WORDS = ("error", "<tool_use_error>")
_ERROR = "Error: "


class History:
    """Builds the chat messages one after the other, and notes where each came from. Methods raise ChatRequestError."""

    def __init__(self, tools: Tools) -> None:
        self.messages: list[Json] = []
        self.places = Places()
        self._tools = tools
        self._loaded: set[str] = set()
        self._number = 0

    def system(self, value: Any) -> None:
        """``system``: one system message, its blocks one after the other."""
        if value is None:
            return
        blocks = [
            (f"system.{position}", block)
            for position, block in enumerate(blocks_of(value, "system"))
            if not is_billing_line(block)
        ]
        if blocks:
            self._say("system", blocks, "system")

    def conversation(self, value: Any) -> None:
        """``messages``."""
        if not is_list(value):
            wrong_type("messages", value, "a list of messages")
        turn: Turn | None = None
        for number, entry in enumerate(value):
            self._number = number
            param = f"messages.{number}"
            message = required_object(entry, param)
            role = message.get("role")
            if role != "assistant":
                turn = None
            if role == "user":
                refuse_unknown(message, _MESSAGE_KEYS, param, "a user message")
                self._user(blocks_of(message.get("content"), f"{param}.content"), param)
            elif role == "assistant":
                turn = self._assistant(turn, message.get("content"), param)
            elif role == "system":
                self._system_message(message, param)
            else:
                refuse(f"{param}.role", "unknown_role", f"got {shown(role)}; allowed are user, assistant and system")
        if turn is not None:
            refuse(
                f"messages.{self._number}.role",
                "prefill_unsupported",
                "the last message is the assistant's: K3 begins every answer with its thinking and cannot go on from a "
                "given beginning; end with a user message",
            )

    def _assistant(self, turn: Turn | None, content: Any, param: str) -> Turn:
        """Add a message to the turn that runs, or begin one: messages of the assistant in a row are one turn."""
        goes_on = turn is not None
        turn = turn or Turn()
        for position, block in enumerate(blocks_of(content, f"{param}.content")):
            turn.add(block, f"{param}.content.{position}")
        if goes_on:
            self.messages[-1] = turn.message()
        else:
            self._add(turn.message(), param)
        return turn

    def _user(self, blocks: list[Json], param: str) -> None:
        """Results first, as K3 has them right behind the calls; then what the user says."""
        said: list[tuple[str, Json]] = []
        loads: list[tuple[str, str]] = []
        for position, block in enumerate(blocks):
            place = f"{param}.content.{position}"
            if block.get("type") == "tool_result":
                loads += self._result(block, place)
            else:
                said.append((place, block))
        self._load(loads)
        if said or not blocks:
            self._say("user", said, param)

    def _result(self, block: Json, param: str) -> list[tuple[str, str]]:
        """A tool message; returns the tools that the result loads, with their places."""
        refuse_unknown(block, _RESULT_KEYS, param, "a tool_result block")
        call_id = text_of(block, param, "tool_use_id")
        failed = block.get("is_error")
        if failed is not None and not isinstance(failed, bool):
            wrong_type(f"{param}.is_error", failed, "a boolean")
        content = block.get("content")
        loads: list[tuple[str, str]] = []
        parts: list[Json] = []
        places: list[str] = []
        for position, inner in enumerate([] if content is None else blocks_of(content, f"{param}.content")):
            place = f"{param}.content.{position}"
            places.append(place)
            if inner.get("type") == "tool_reference":
                refuse_unknown(inner, _REFERENCE_KEYS, place, "a tool_reference block")
                name = text_of(inner, place, "tool_name")
                loads.append((name, f"{place}.tool_name"))
                parts.append(marked({"type": "text", "text": f"Tool loaded: {name}\n"}, inner))
            else:
                parts.append(part_of(inner, place))
        if failed and not str(parts[0].get("text", "") if parts else "").lstrip().lower().startswith(_ERROR_WORDS):
            parts.insert(0, {"type": "text", "text": _ERROR})
            places.insert(0, param)
            if len(parts) == 2 and set(parts[1]) == {"type", "text"}:
                parts = [{"type": "text", "text": _ERROR + parts[1]["text"]}]
        message = marked({"role": "tool", "tool_call_id": call_id, "content": plain(parts) if parts else ""}, block)
        self._add(message, param, places)
        return loads

    def _system_message(self, message: Json, param: str) -> None:
        refuse_unknown(message, _SYSTEM_KEYS, param, "a system message")
        if message.get("clear_at") not in (None, "never"):
            refuse(
                f"{param}.clear_at",
                "unsupported_value",
                f'got {shown(message["clear_at"])}; only "never": what stood in a prompt stays in it',
            )
        if message.get("output_config"):
            refuse(f"{param}.output_config", "unsupported_field", "effort holds for the whole conversation here")
        said: list[tuple[str, Json]] = []
        changes: list[tuple[str, Json]] = []
        for position, block in enumerate(blocks_of(message.get("content"), f"{param}.content")):
            place = f"{param}.content.{position}"
            is_change = block.get("type") in ("tool_addition", "tool_removal")
            (changes if is_change else said).append((place, block))
        if said:
            self._say("system", said, param)
        for place, block in changes:
            self._change(block, place)

    def _change(self, block: Json, param: str) -> None:
        """A tool that is offered from here on; K3 declares it where it comes."""
        refuse_unknown(block, _CHANGE_KEYS, param, f"a {block['type']} block")
        if block["type"] == "tool_removal":
            refuse(f"{param}.type", "unsupported_block", "K3 cannot be told that a tool has gone; leave it declared")
        tool = required_object(block.get("tool"), f"{param}.tool")
        if tool.get("type") == "tool_reference":
            name = text_of(tool, f"{param}.tool", "name")
            self._load([(name, f"{param}.tool.name")], block)
        elif tool.get("type") == "tool_definition":
            definition = required_object(tool.get("definition"), f"{param}.tool.definition")
            chat = decode_tool(definition, f"{param}.tool.definition")
            self._loaded.add(str(definition.get("name")))
            self._add(marked({"role": "system", "tools": [chat]}, block), param)
        else:
            refuse_block(tool.get("type"), f"{param}.tool", "tool_reference and tool_definition")

    def _load(self, names: list[tuple[str, str]], block: Json | None = None) -> None:
        """Declare deferred tools here, those that are not declared yet."""
        new: list[Json] = []
        for name, param in names:
            known = any(tool["function"]["name"] == name for tool in self._tools.declared)
            if known or name in self._loaded:
                continue
            tool = self._tools.find(name)
            if tool is None:
                refuse(param, "unknown_tool", f"{shown(name)} is not among `tools`; send its declaration with them")
            self._loaded.add(name)
            new.append(tool)
        if new:
            self._add(marked({"role": "system", "tools": new}, block or {}), names[0][1])

    def _say(self, role: str, blocks: list[tuple[str, Json]], param: str) -> None:
        for place, block in blocks:
            if role == "system" and block.get("type") != "text":
                refuse_block(block.get("type"), place, "text")
        parts = [part_of(block, place) for place, block in blocks]
        self._add({"role": role, "content": plain(parts) if parts else ""}, param, [place for place, _ in blocks])

    def _add(self, message: Json, param: str, parts: list[str] | None = None) -> None:
        index = len(self.messages)
        for position, place in enumerate(parts or ()):
            self.places.parts[index, position] = place
        self.places.messages.append((param, self._number))
        self.messages.append(message)
