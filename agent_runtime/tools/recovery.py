"""Look up the exact text of a session in its run log: what a compression or a cut took out of the model's sight."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

from pydantic import Field

from agent_runtime.runstore import Entry
from agent_runtime.step import RECOVERY_TOOL
from agent_runtime.subagents import running_agent
from agent_runtime.tools.registry import Tool, tool
from agent_runtime.tools.result import ToolError, ToolResult

_MAX_CHARS: Final = 20_000
_MAX_FOUND: Final = 20
_AROUND_CHARS: Final = 120


def recovery_tools() -> list[Tool]:
    """`read_history` and `search_history`, over the log of the session that calls them."""
    return [tool(name=RECOVERY_TOOL)(_read_history), tool(name="search_history")(_search_history)]


async def _read_history(
    first: Annotated[int, Field(ge=1, description="Number of the first message, from 1.")] = 1,
    last: Annotated[int | None, Field(ge=1, description="Number of the last message; default: only the first.")] = None,
    call_id: Annotated[str, Field(description="Id of a call whose whole result to read instead.")] = "",
    offset: Annotated[int, Field(ge=0, description="Characters to skip, to read on in a long text.")] = 0,
) -> ToolResult:
    """Read messages of this session exactly as they were, or the whole result of one tool call."""
    entries = _entries()
    if call_id:
        return _part(_call_result(entries, call_id), offset)
    messages = _messages(entries)
    end = first if last is None else last
    if not 1 <= first <= end or first > len(messages):
        raise ToolError(f"messages {first} to {end} are not there; this session has messages 1 to {len(messages)}")
    chosen = enumerate(messages[first - 1 : end], start=first)
    return _part("\n".join(f"[{number}] {_shown(message)}" for number, message in chosen), offset)


async def _search_history(
    text: Annotated[str, Field(description="Text to look for, taken literally.", min_length=1)],
) -> ToolResult:
    """Find the messages of this session that contain a text, latest first."""
    found: list[str] = []
    messages = _messages(_entries())
    for number in range(len(messages), 0, -1):
        shown = _shown(messages[number - 1])
        place = shown.find(text)
        if place >= 0:
            around = shown[max(0, place - _AROUND_CHARS) : place + len(text) + _AROUND_CHARS]
            found.append(f"[{number}] …{around}…")
        if len(found) == _MAX_FOUND:
            found.append(f"[only the latest {_MAX_FOUND} are shown]")
            break
    return ToolResult("\n".join(found) or f"No message contains {text!r}.", f"messages found: {len(found)}")


def _entries() -> list[Entry]:
    agent = running_agent.get()
    if agent is None:
        raise ToolError("There is no session; this tool works inside an agent's run only.")
    return list(agent.history.store.entries())


def _messages(entries: list[Entry]) -> list[dict[str, Any]]:
    return [entry["message"] for entry in entries if entry["kind"] in ("message", "run")]


def _call_result(entries: list[Entry], call_id: str) -> str:
    for entry in entries:
        if entry["kind"] == "result" and entry["call"] == call_id:
            return entry["result"]["full"] or entry["result"]["model"]
    raise ToolError(f"no call with the id {call_id!r} has a result in this session")


def _shown(message: dict[str, Any]) -> str:
    parts = [str(message["role"])]
    if message.get("reasoning_content"):
        parts.append(f"(thinking) {message['reasoning_content']}")
    if message.get("content"):
        parts.append(str(message["content"]))
    if message.get("tool_calls"):
        parts.append(json.dumps([call["function"] for call in message["tool_calls"]], ensure_ascii=False))
    return ": ".join([parts[0], "\n".join(parts[1:])])


def _part(text: str, offset: int) -> ToolResult:
    if offset and offset >= len(text):
        raise ToolError(f"offset={offset} is behind the end; the text has {len(text)} characters")
    part = text[offset : offset + _MAX_CHARS]
    end = offset + len(part)
    if end < len(text):
        part += f"\n[{len(text) - end} more characters; continue with offset={end}]"
    return ToolResult(part, f"characters {offset} to {end} of {len(text)}")
