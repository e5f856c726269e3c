"""Counters of the cache: checkpoints made, reused, evicted and skipped, and where prompt tokens came from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from k3_sglang.cache.placement import Reason
from k3_sglang.cache.types import Limit, Role, Skip

_KINDS: dict[str, type[Enum]] = {"evicted": Role, "skipped": Skip, "cuts": Reason, "hits_ended_by": Limit}


@dataclass
class Metrics:
    """Counts since the start of the process; a flush does not reset them."""

    made: int = 0
    reused: int = 0
    evicted: Counter[Role] = field(default_factory=Counter[Role])
    """By the role at the time."""
    dropped_with_kv: int = 0
    """Checkpoints that went because their KV had to."""
    skipped: Counter[Skip] = field(default_factory=Counter[Skip])
    cuts: Counter[Reason] = field(default_factory=Counter[Reason])
    waited_rounds: int = 0
    """Scheduling rounds that requests spent waiting for another one's checkpoint."""
    released: int = 0
    hits_ended_by: Counter[Limit] = field(default_factory=Counter[Limit])
    """Requests by the reason why they did not reuse more."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    no_kv_tokens: int = 0
    """Prompt tokens whose KV was not in the tree: new text, or evicted."""
    no_state_tokens: int = 0
    """Prompt tokens whose KV was there, below the deepest usable state."""
    unkept_tokens: int = 0
    """Tokens of finished requests beyond their deepest state: keys are whole pages, and some cuts do not pay."""
    resynchronised: int = 0
    """The index had to be rebuilt from the tree; anything but 0 is a defect."""

    def as_json(self) -> dict[str, Any]:
        """Plain values; of what is counted by an enumeration every member, also at 0."""
        return {
            name: {member.value: value[member] for member in _KINDS[name]} if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }
