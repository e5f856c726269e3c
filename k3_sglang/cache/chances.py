"""How likely a checkpoint is to be used again, by its role and by what is known of its session."""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3_sglang.cache.types import Checkpoint, Role


@dataclass(frozen=True)
class EvictionSettings:
    """The policy's constants: one set for every budget and load (docs/cache.md says how they were found).

    Chances are of the next request of a session that comes back.
    """

    tip: float = 0.8
    """It extends the last turn."""
    prompt_end: float = 0.15
    """It keeps the last prompt, not the answer: reasoning is dropped, or the answer comes back in other tokens."""
    last_turn: float = 0.01
    """It keeps what lay before the last prompt's end: the last message is replaced."""
    edit: float = 0.005
    """It leaves the path between here and twice as deep: edits of the history lie anywhere, on a log scale."""
    fork_per_child: float = 0.3
    """Each path that went on from here is evidence for another."""
    fork_most: float = 0.9
    declared: float = 0.15
    """At least this for a boundary the caller named, whatever the role."""
    released: float = 0.001
    """Multiplies: the session is over, yet somebody may resume it."""
    left: float = 0.03
    """Multiplies: the session went on from elsewhere (its history was rewritten, or the only path below the checkpoint
    that was used went another way); some come back."""
    waits: float = 0.5
    """Multiplies: the session announced a wait as long as a person's, not a tool's."""
    long_wait_s: float = 60.0
    """Announced waits from here on are a person's."""
    octaves: float = 1.1
    """log2 lost per doubling of the time a path was not used."""
    pauses: float = 1.5
    """Half of the returns come within one measured pause; the hazard is flat for so many of them."""
    pause: float = 5.0
    """Requests between two uses of a tip, until enough were seen."""
    pause_weight: float = 0.02
    """Step of the running median."""
    pause_drift: float = 1.25
    """Heaps are rebuilt when the median has moved by this factor."""
    pinned_share: float = 0.25
    """At most this share of all checkpoints may be pinned; further pins are treated as declared."""


def chance(checkpoint: Checkpoint, settings: EvictionSettings) -> float:
    """Probability that the next request of a session that comes back starts here, without recency."""
    role = checkpoint.role
    if role is Role.TIP:
        likely = settings.tip
    elif role is Role.PROMPT_END:
        likely = settings.prompt_end
    elif role is Role.FORK:
        likely = min(settings.fork_per_child * len(checkpoint.children), settings.fork_most)
    else:
        (child,) = checkpoint.children.values()
        likely = settings.edit * math.log2(child.depth / checkpoint.depth)
        if child.role is Role.PROMPT_END:
            likely += settings.last_turn
    if checkpoint.declared:
        likely = max(likely, settings.declared)
    if checkpoint.left:
        likely *= settings.left
    if checkpoint.waits:
        likely *= settings.waits
    return likely * settings.released if checkpoint.released else likely
