"""Dumps of a checkpoint cache as the engine gives them, of any size."""

from __future__ import annotations

import random
from typing import Any

ROLES = ("tip", "prompt_end", "superseded", "fork")


def checkpoint(chooser: random.Random, gap: int, **fields: Any) -> dict[str, Any]:
    """One checkpoint of a dump."""
    return {
        "role": chooser.choice(ROLES),
        "gap": gap,
        "score": chooser.uniform(-4, 12),
        "age": float(chooser.randint(0, 400)),
        "hits": chooser.randint(0, 9),
        "saved_tokens": chooser.randint(0, 90_000),
        "session": f"session:agent {chooser.randint(1, 40)}",
        "locked": chooser.random() < 0.03,
        "declared": False,
        "released": False,
        "left": chooser.random() < 0.1,
        "pinned": chooser.random() < 0.03,
        **fields,
    }


def dump(nodes: int, seed: int = 1) -> dict[str, Any]:
    """A head that many sessions share, and their paths below it, ``nodes`` nodes together."""
    chooser = random.Random(seed)
    made: list[dict[str, Any]] = []
    for number in range(1, nodes + 1):
        above = None if number == 1 else made[0] if chooser.random() < 0.1 else made[-1]
        start = 0 if above is None else above["end"]
        gap = 2400 if above is None else chooser.randint(50, 3000)
        kept = checkpoint(chooser, gap) if chooser.random() < 0.7 else None
        parent = None if above is None else above["id"]
        made.append(
            {"id": number, "parent": parent, "start": start, "end": start + gap, "kv": True, "checkpoint": kept}
        )
    return {
        "nodes": made,
        "slots": {"total": 512, "free": 40},
        "stored_slots": None,
        "tick": 4711,
        "reuse_interval": 12.3,
        "checkpoint_bytes": 16_253 * 27_648,
        "kv_token_bytes": 27_648.0,
        "metrics": {
            "made": 900, "reused": 700, "evicted": {"tip": 3, "superseded": 400}, "dropped_with_kv": 4, "skipped": {},
            "cuts": {}, "waited_rounds": 0, "released": 3, "hits_ended_by": {"no_kv": 600, "whole": 12},
            "prompt_tokens": 5_000_000, "cached_tokens": 4_600_000, "no_kv_tokens": 390_000, "no_state_tokens": 10_000,
            "unkept_tokens": 3, "resynchronised": 0,
        },
    }  # fmt: skip
