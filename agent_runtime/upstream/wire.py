"""Messages and tools as another server gets them, so that what was said before is said again byte for byte."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent_runtime.upstream.profiles import Profile
from k3_sglang.chat.toolresults import match_ids
from k3_sglang.chat.types import ChatRequest, Content, ImagePart, JSONObject, Message, NamedTool, ToolCall


def json_bytes(value: Any) -> bytes:
    """JSON without spaces, keys in their order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def assistant(message: Message, profile: Profile) -> JSONObject:
    """A turn: its thinking in the server's field, its calls with the ids and arguments that the server gave them."""
    body: JSONObject = {"role": "assistant", **_name(message)}
    if message.reasoning is not None:
        body[profile.thinking_field] = message.reasoning
    if not (profile.omits_empty_content and message.tool_calls and not message.content):
        body["content"] = _content(message.content)
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for id, call in zip(_ids(message.tool_calls), message.tool_calls, strict=True)
        ]
    return body


def history(
    messages: Sequence[Message], received: Mapping[int, Sequence[ToolCall]], profile: Profile
) -> list[JSONObject]:
    """All messages of a request.

    ``received`` are the calls of turns as the client sent them, by place, where they have other ids than in
    ``messages``: results answer those.
    """
    made: list[JSONObject] = []
    answered = _Answered((), ())
    for place, message in enumerate(messages):
        if message.role == "assistant":
            answered = _Answered(received.get(place, message.tool_calls), _ids(message.tool_calls))
            made.append(assistant(message, profile))
        elif message.role == "tool":
            made.append(_result(message, answered))
        elif message.tools:
            made.append({"role": message.role, "tools": list(message.tools)})
        else:
            made.append({"role": message.role, **_name(message), "content": _content(message.content)})
    return made


class _Answered:
    """The ids that the results of one turn get: those of the calls they answer."""

    def __init__(self, calls: Sequence[ToolCall], ids: Sequence[str]) -> None:
        self._calls, self._ids = calls, ids
        self._seen: list[str | None] = []

    def next_id(self, received: str | None) -> str | None:
        """The id for the next result, which the client sent with ``received``."""
        self._seen.append(received)
        place = match_ids(self._seen, self._calls)[-1]
        if place is None and not received:
            place = len(self._seen) - 1  # results without ids answer by their place
        return self._ids[place] if place is not None and place < len(self._ids) else received


def _result(message: Message, answered: _Answered) -> JSONObject:
    id = answered.next_id(message.tool_call_id)
    named = {"name": message.name} if id is None and message.name else {}
    return {"role": "tool", **({"tool_call_id": id} if id is not None else named), "content": _content(message.content)}


def _ids(calls: Sequence[ToolCall]) -> list[str]:
    """Ids of a turn's calls; those without one get their place."""
    return [call.upstream_id or call.id or f"call_{place}" for place, call in enumerate(calls)]


def _name(message: Message) -> JSONObject:
    return {"name": message.name} if message.name else {}


def _content(content: Content) -> Any:
    return content if content is None or isinstance(content, str) else list(_parts(content))


def _parts(content: Sequence[Any]) -> Iterator[JSONObject]:
    for part in content:
        if isinstance(part, ImagePart):
            yield {"type": "image_url", "image_url": {"url": part.source}}
        else:
            yield {"type": "text", "text": part.text}


def head(request: ChatRequest, *, effort_sent: bool, profile: Profile) -> JSONObject:
    """What stands before the messages in the prompt: tools and how much to think."""
    fields: JSONObject = {"tools": list(request.tools)} if request.tools else {}
    if not request.thinking:
        fields.update(profile.thinking_off or {})
    elif effort_sent:
        fields["reasoning_effort"] = request.effort
    return fields


def tail(request: ChatRequest, response_format: Any) -> JSONObject:
    """What stands behind them, for one turn only."""
    fields: JSONObject = {}
    if isinstance(request.tool_choice, NamedTool):
        fields["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.name}}
    elif request.tool_choice is not None:
        fields["tool_choice"] = request.tool_choice
    if request.response_format is not None:
        fields["response_format"] = response_format
    if not request.parallel_tool_calls:
        fields["parallel_tool_calls"] = False
    return fields
