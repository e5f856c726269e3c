"""Commands that steer the cache of a running engine: release and abandon sessions, pin a beginning.

All may be repeated. They change what is dropped first, never what a request is answered.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from k3_sglang import compat
from k3_sglang.cache.hints import MAX_NOW_S, MAX_SECONDS
from k3_sglang.cache.remote import CommandError, command
from k3_sglang.cache.types import Checkpoint

MAX_IDS = 1 << 24
MAX_SESSION_CHARS = 256


@command("release", changes=True)
def release(states: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """``session``: it is certainly over. Checkpoints that it alone used may go."""
    _fields(body, "session")
    released = states._index().release(_session(body))
    states.metrics.released += released
    return {"released": released}


@command("abandon", changes=True)
def abandon(states: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """``session`` and ``from``: it will hardly go on behind so many tokens, as after its history was summarised."""
    _fields(body, "session", "from")
    start = body.get("from", 0)
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise CommandError(f"from is {str(start)[:80]}; it must be a number of tokens, 0 or more")
    return {"demoted": states._index().demote(_session(body), start)}


@command("pin", changes=True)
def pin(states: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """``ids``, ``seconds``, ``now_s``: keep the deepest checkpoint of a beginning; 0 seconds end its pin.

    Returns ``position`` (0 when nothing of the beginning is kept), ``pinned``, and ``reason`` when it is not.
    """
    _fields(body, "ids", "seconds", "now_s")
    seconds = _number(body, "seconds", MAX_SECONDS)
    now_s = _number(body, "now_s", MAX_NOW_S)
    index = states._index()
    index.clock_s = max(index.clock_s, now_s)
    found = deepest(states, _ids(body))
    if found is None:
        return {"position": 0, "pinned": False, "reason": "not_cached"}
    if not seconds:
        index.unpin(found.key)
        return {"position": found.depth, "pinned": False, "reason": "ended"}
    pinned = index.pin(found.key, max(found.pinned_until_s, index.clock_s + seconds))
    return {"position": found.depth, "pinned": pinned} | ({} if pinned else {"reason": "budget"})


def deepest(states: Any, ids: array[int]) -> Checkpoint | None:
    """The deepest checkpoint on the path of some tokens, at most at their end. Looks only."""
    core, index = states.tree_core, states._index()
    key = compat.RadixKey(ids)
    node, position, found = core.root_node, 0, None
    while position + core.page_size <= len(ids):
        child = node.children.get(key.child_key_at(position, core.page_size))
        if child is None or child.key.match_at(key, position, page_size=core.page_size) < len(child.key):
            break
        node, position = child, position + len(child.key)
        found = index.get(node.id) or found
    return found


def _fields(body: Mapping[str, Any], *allowed: str) -> None:
    for name in body:
        if name not in allowed:
            raise CommandError(f"{name[:80]!r} is not known; allowed: {', '.join(allowed)}")


def _session(body: Mapping[str, Any]) -> str:
    session = body.get("session")
    if not isinstance(session, str) or not 0 < len(session) <= MAX_SESSION_CHARS:
        raise CommandError(f"session is {str(session)[:80]!r}; it must be text of 1 to {MAX_SESSION_CHARS} characters")
    return session


def _number(body: Mapping[str, Any], name: str, most: float) -> float:
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise CommandError(f"{name} is {str(value)[:80]}; it must be a number of seconds, 0 to {most:g}")
    return float(value)


def _ids(body: Mapping[str, Any]) -> array[int]:
    ids: Any = body.get("ids")
    fits = isinstance(ids, list) and 0 < len(ids) <= MAX_IDS
    if not fits or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise CommandError(f"ids is {str(ids)[:80]}; it must be a list of 1 to {MAX_IDS} token ids")
    return array("q", ids)
