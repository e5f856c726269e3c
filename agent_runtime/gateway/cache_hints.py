"""What the engine's cache is told with a request: its session, the positions others share, and what will follow."""

import json
from typing import Any

from agent_runtime.gateway.cache_fields import CacheFields, Session
from agent_runtime.gateway.positions import Positions

PARAMETER = "k3_cache"
"""Key inside SGLang's ``custom_params`` under which the cache reads hints: as text, because SGLang allows no lists
in objects inside ``custom_params``."""


def cache_hints(
    positions: Positions, prompt_tokens: int, session: Session | None, fields: CacheFields | None, now_s: float
) -> dict[str, str]:
    """SGLang's ``custom_params`` for a request. ``now_s`` is this process's clock, on which the cache counts expiries.

    The end of the history is named only where an instruction for this turn stands behind it: elsewhere the next
    prompt goes on from the end of this one, or of the answer, and both are kept anyway. For the same reason a mark
    there is moved to the end of the prompt: clients that mark the last message of every turn would else have each
    prefill cut a few tokens before its end.
    """
    hints: dict[str, Any] = {"now_s": now_s, "head_len": positions.head_len}
    if positions.one_shot:
        hints["boundaries"] = [positions.history_len]
    if positions.marks:
        end = None if positions.one_shot else positions.history_len
        hints["pins"] = [
            [prompt_tokens if mark.position == end else mark.position, mark.ttl_s] for mark in positions.marks
        ]
    if session is not None:
        hints["session"] = session.engine_name
        if not session.is_conversation:
            hints["is_conversation"] = False
    if fields is not None:
        given = fields.model_dump(exclude={"session"}, exclude_none=True)
        hints.update(given)
    return {PARAMETER: json.dumps(hints)}
