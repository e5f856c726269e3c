"""What an agent runtime would have told the cache with each recorded request; nothing it could not have known."""

from __future__ import annotations

from typing import Any

from k3_sglang.cache.replay.schedule import Step

PARAMETER = "k3_cache"
"""Key of the hints inside ``custom_params``."""

TOOL_WAIT_S = 15.0
PERSON_WAIT_S = 300.0
"""Waits a runtime would expect after a tool call and after a finished answer; not taken from the trace."""


def step_hints(step: Step, grain: int) -> dict[str, Any]:
    """``custom_params`` of a step: session, shared head, expected wait, and release when its stream is over.

    Positions are in units of ``grain`` tokens. A load without sessions gets no hints.
    """
    if not step.head_tokens:
        return {}
    hints: dict[str, Any] = {
        "session": step.stream,
        "head_len": step.head_tokens // grain,
        "wait_s": TOOL_WAIT_S if step.request.waits_for_tool else PERSON_WAIT_S,
        "release": step.last_of_stream,
        "now_s": step.start,
    }
    return {PARAMETER: hints}
