"""The models of this server as Anthropic's API lists them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from agent_runtime.gateway.settings import GatewaySettings

Json = dict[str, Any]


def model_object(name: str, settings: GatewaySettings, started_s: int) -> Json:
    """One model; its age is that of this process."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(started_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": settings.context_len,
        "max_tokens": min(settings.max_output_tokens, settings.context_len),
    }


def model_list(names: Sequence[str], settings: GatewaySettings, started_s: int) -> Json:
    """All of them on one page."""
    return {
        "data": [model_object(name, settings, started_s) for name in names],
        "has_more": False,
        "first_id": names[0],
        "last_id": names[-1],
    }
