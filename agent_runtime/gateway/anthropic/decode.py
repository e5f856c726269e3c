"""A messages request to the body of the chat completion that asks the same: nothing of it is ignored."""

import json
from dataclasses import dataclass
from typing import Any

from agent_runtime.gateway.anthropic.blocks import Json
from agent_runtime.gateway.anthropic.history import History
from agent_runtime.gateway.anthropic.places import Places
from agent_runtime.gateway.anthropic.tools import decode_choice, decode_tools
from k3_sglang.chat.cache_marks import MARK
from k3_sglang.chat.json_types import is_list, is_object
from k3_sglang.chat.request_fields import refuse, refuse_unknown, required_object, shown, wrong_type

BUDGET_OF_HIGH, BUDGET_OF_MAX = 4_096, 16_384
"""`thinking.budget_tokens` from which effort is high, and max, for clients that name a budget and no effort."""

_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_DISPLAYS = (None, "summarized", "omitted", "updates")
_KEPT = ("model", "stream", "temperature", "top_p", "top_k", "k3")
_READ = frozenset(
    ("messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format", "metadata",
     "max_tokens", "stop_sequences", "context_management", "service_tier", "speed", "inference_geo", "container",
     "mcp_servers", MARK, *_KEPT)
)  # fmt: skip
_REFUSED = {
    "container": "there are no containers here",
    "mcp_servers": "no tools are run here; connect MCP servers in the client",
    "fallbacks": "there is one model",
    "compaction": "histories are not compacted here; do it in the client",
    "prefill": "K3 begins every answer with its thinking and cannot go on from a given beginning",
}
_MAX_USER_CHARS = 512


@dataclass(frozen=True, slots=True)
class Decoded:
    """A request: the body of the chat completion, where its messages came from, and what its answer must have.

    ``hides_thinking``: thinking goes out as its signature alone. ``manages_context``: the answer says what was cleared.
    """

    body: Json
    places: Places
    hides_thinking: bool
    manages_context: bool


def decode(body: Json, *, counting: bool = False) -> Decoded:
    """Read a request; when ``counting``, one that asks for the length of its prompt. Raises ChatRequestError."""
    _check_fields(body)
    if not counting and not _is_count(body.get("max_tokens")):
        wrong_type("max_tokens", body.get("max_tokens"), "a whole number of at least 1; it is required")
    tools = decode_tools(body.get("tools"))
    history = History(tools)
    history.system(body.get("system"))
    history.conversation(body.get("messages"))
    chat: Json = {key: body[key] for key in _KEPT if body.get(key) is not None}
    chat["messages"] = history.messages
    if body.get(MARK) is not None and history.messages:
        history.messages[-1].setdefault(MARK, body[MARK])
    if tools.declared:
        chat["tools"] = tools.declared
    chat.update(decode_choice(body.get("tool_choice")))
    if body.get("max_tokens") is not None:
        chat["max_tokens"] = body["max_tokens"]
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    display = _thinking(body, chat)
    _metadata(body.get("metadata"), chat)
    return Decoded(chat, history.places, display == "omitted", _context_management(body.get("context_management")))


def _check_fields(body: Json) -> None:
    for key, value in body.items():
        if value is None or (key in _READ and key not in _REFUSED) or (key in _REFUSED and value == []):
            continue
        reason = _REFUSED.get(key, "it is not known here")
        refuse(key[:80], "unsupported_field", f"{reason}. Accepted: {', '.join(sorted(_READ - set(_REFUSED)))}")
    for key, allowed in (
        ("service_tier", ("auto", "standard_only")),
        ("speed", ("standard",)),
        ("inference_geo", ("global", "not_available")),
    ):
        if body.get(key) is not None and body[key] not in allowed:
            refuse(key, "unsupported_value", f"got {shown(body[key])}; allowed: {', '.join(allowed)}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _thinking(body: Json, chat: Json) -> Any:
    """`thinking` and `output_config` as effort, thinking and response format; returns the display."""
    config = required_object(body.get("output_config") or {}, "output_config")
    refuse_unknown(config, frozenset(("effort", "format")), "output_config", "output_config")
    effort = config.get("effort")
    if effort is not None and effort not in _EFFORTS:
        refuse("output_config.effort", "unsupported_reasoning_effort", f"got {shown(effort)}; allowed: {_EFFORTS}")
    for value, param in ((config.get("format"), "output_config.format"), (body.get("output_format"), "output_format")):
        if value is not None:
            chat["response_format"] = _format(required_object(value, param), param)
    thinking = required_object(body.get("thinking") or {"type": "adaptive"}, "thinking")
    if thinking.get("block_binding") == {}:  # the API's word for leaving it out
        thinking = {key: value for key, value in thinking.items() if key != "block_binding"}
    refuse_unknown(thinking, frozenset(("type", "budget_tokens", "display")), "thinking", "thinking")
    kind, budget, display = thinking.get("type"), thinking.get("budget_tokens"), thinking.get("display")
    if kind not in ("enabled", "adaptive", "disabled"):
        refuse("thinking.type", "invalid_thinking", f"got {shown(kind)}; allowed: enabled, adaptive, disabled")
    if display not in _DISPLAYS:
        refuse("thinking.display", "invalid_thinking", f"got {shown(display)}; allowed: summarized, omitted, updates")
    if budget is not None and not _is_count(budget):
        wrong_type("thinking.budget_tokens", budget, "a whole number of at least 1")
    if effort is None and budget is not None:
        effort = "max" if budget >= BUDGET_OF_MAX else "high" if budget >= BUDGET_OF_HIGH else "low"
    if effort is not None:
        chat["reasoning_effort"] = effort
    if kind == "disabled":
        chat["thinking"] = {"type": "disabled"}
    return display


def _format(value: Json, param: str) -> Json:
    refuse_unknown(value, frozenset(("type", "schema")), param, "an output format")
    if value.get("type") != "json_schema" or not is_object(value.get("schema")):
        wrong_type(param, value, 'an object {"type": "json_schema", "schema": {...}}')
    return {"type": "json_schema", "json_schema": {"schema": value["schema"]}}


def _metadata(value: Any, chat: Json) -> None:
    """`metadata.user_id` names the session if it holds one, as Claude Code's does; else a person."""
    metadata = required_object(value or {}, "metadata")
    refuse_unknown(metadata, frozenset(("user_id",)), "metadata", "metadata")
    user = metadata.get("user_id")
    if user is None:
        return
    if not isinstance(user, str) or len(user) > _MAX_USER_CHARS:
        wrong_type("metadata.user_id", user, f"a string of at most {_MAX_USER_CHARS} characters")
    session = session_in(user)
    if session:
        chat["metadata"] = {"session_id": session}
    elif user:
        chat["user"] = user


def session_in(user: str) -> str | None:
    """The session that Claude Code names in the user's id: in a JSON object, or behind ``_session_`` in older ones."""
    try:
        value: Any = json.loads(user)
    except (ValueError, RecursionError):
        head, mark, session = user.rpartition("_session_")
        return session if head and mark else None
    session = value.get("session_id") if is_object(value) else None
    return session if isinstance(session, str) else None


def _context_management(value: Any) -> bool:
    """Whether the field is there. Only keeping all thinking can be asked for, which is what is done anyway."""
    if value is None:
        return False
    config = required_object(value, "context_management")
    refuse_unknown(config, frozenset(("edits",)), "context_management", "context_management")
    edits: Any = config.get("edits") or list[Any]()
    if not is_list(edits):
        wrong_type("context_management.edits", edits, "a list of edits")
    for position, entry in enumerate(edits):
        param = f"context_management.edits.{position}"
        edit = required_object(entry, param)
        kind = edit.get("type")
        if isinstance(kind, str) and kind.startswith("clear_thinking_"):
            if edit.get("keep") not in ("all", {"type": "all"}) or set(edit) != {"type", "keep"}:
                refuse(f"{param}.keep", "unsupported_value", 'K3 works with all its thinking: only "keep": "all"')
        else:
            refuse(
                f"{param}.type",
                "unsupported_value",
                f"got {shown(kind)}: the history is not changed here, since every change costs the cached prefix; "
                "clear or compact in the client",
            )
    return True
