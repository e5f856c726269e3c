"""The response object: what of the request it repeats, and how it goes from one status to the next."""

from collections.abc import Mapping
from typing import Any

from agent_runtime.gateway.completion import Facts
from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.responses.decode import Decoded
from agent_runtime.gateway.responses.item_ids import response_id
from agent_runtime.gateway.settings import GatewaySettings

Json = dict[str, Any]

_ERROR_CODES = {400: "invalid_prompt", 413: "invalid_prompt", 422: "invalid_prompt", 429: "rate_limit_exceeded"}
_REPEATED = ("instructions", "max_output_tokens", "previous_response_id")


def new_response(body: Mapping[str, Any], decoded: Decoded, facts: Facts, settings: GatewaySettings) -> Json:
    """A response that has just begun. Where the request says nothing, what happens is said."""
    fields = decoded.fields
    reasoning: Json = body.get("reasoning") or {}
    text: Json = body.get("text") or {}
    return {
        "id": response_id(facts.token),
        "object": "response",
        "created_at": facts.created,
        "status": "in_progress",
        "background": bool(fields.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        **{name: getattr(fields, name) for name in _REPEATED},
        "max_tool_calls": None,
        "model": facts.model,
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort") or "max", "summary": None},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "default",
        "store": fields.stored,
        "temperature": _or(body.get("temperature"), settings.default_temperature),
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": 0,
        "top_p": _or(body.get("top_p"), settings.default_top_p),
        "truncation": "disabled",
        "usage": None,
        "user": body.get("user"),
        "metadata": body.get("metadata") or {},
    }


def failed(response: Json, error: ApiError) -> Json:
    """The response after a failure. ``code`` is one of the API's words, the message says what really happened."""
    code = _ERROR_CODES.get(error.status, "server_error")
    return {**response, "status": "failed", "error": {"code": code, "message": error.message}}


def cancelled(response: Json) -> Json:
    """The response when nobody waits for it any more."""
    return {**response, "status": "cancelled"}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
