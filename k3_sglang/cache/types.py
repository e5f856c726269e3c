"""What the cache's decisions see of the tree: one record per checkpoint, its role and why things were not kept.

A checkpoint is the pair of the KV cache up to a position and the recurrent state at exactly that position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

INFO = "k3_cache"
"""Key in the ``meta_info`` of an answer: a list of one object that says what was reused and why not more."""


class Role(Enum):
    """Where a checkpoint stands among the others; decides how likely it is to be used again."""

    TIP = "tip"
    """Nothing deeper: where a live session goes on."""
    PROMPT_END = "prompt_end"
    """Exactly one deeper on its only path: used when the answer comes back changed, for example without reasoning."""
    SUPERSEDED = "superseded"
    """Two or more deeper on its only path: used when the client edits its history."""
    FORK = "fork"
    """Several paths go on from it."""


class Skip(Enum):
    """Why a checkpoint was not made, a hit not taken or a cut not placed; keys of the counters."""

    NO_SLOT = "no_slot"
    """Every slot is held by running requests: the checkpoint is not kept."""
    NO_SLOT_FOR_HIT = "no_slot_for_hit"
    """No slot to restore into: the request computes its prompt from the start."""
    CUT_BUSY = "cut_busy"
    """Another request is between two chunks; the scheduler carries only one such request."""
    CUT_TOO_DEAR = "cut_too_dear"
    """The expected saving does not pay for the extra pass."""
    BAD_HINT = "bad_hint"
    """A hint that cannot be read; the request runs without it."""


class Limit(Enum):
    """What ended a hit: why a request did not reuse more of its prompt."""

    WHOLE = "whole"
    """Nothing: all but the last token, which has to be computed for the first one of the answer."""
    NO_KV = "no_kv"
    """The text that follows was not seen here after this beginning."""
    NO_STATE = "no_state"
    """KV goes further, but no state was ever kept deeper on this path: another path left it here."""
    EVICTED = "evicted"
    """KV or a state that reached further was dropped to make room."""
    BOUNDARY = "boundary"
    """Computed before but not kept: only whole pages can be, and a cut must pay for its pass."""
    NO_SLOT = "no_slot"
    """There was a hit, but no free slot to restore its state into."""
    ASKED = "asked"
    """The request wants something computed for tokens of its prompt, such as log-probabilities."""


@dataclass(slots=True, eq=False)
class Checkpoint:
    """One checkpoint as the eviction policy sees it. Compared by identity."""

    key: int
    """The tree's node id."""
    depth: int
    """Tokens from the root to the checkpoint's position."""
    parent: Checkpoint | None
    """The next shallower checkpoint on its path."""
    children: dict[int, Checkpoint] = field(default_factory=dict[int, "Checkpoint"])
    """The next deeper checkpoints by key, one per path; a dict, because its order is the same in every rank."""
    last_use: float = 0.0
    """Tick at which it or a deeper one on its path was used last."""
    session: str | None = None
    """The only session that made or used it; None when unknown or shared."""
    shared: bool = False
    """A second session used it."""
    locked: bool = False
    declared: bool = False
    """The caller named its position as a boundary that others will share."""
    released: bool = False
    """Its session is over."""
    left: bool = False
    """Its session went on from elsewhere."""
    waits: bool = False
    """Its session announced a long wait."""
    pinned_until_s: float = 0.0
    """Logical time (see :class:`~k3_sglang.cache.policy.CheckpointIndex`) until which it is not evicted."""
    chance: float = 0.0
    """log2 of the probability that it is used again, without recency."""
    value: float = 0.0
    """log2 of the expected saving in tokens, without recency."""
    version: int = 0
    """Entries of the queues with another version are stale."""
    hits: int = 0
    """Requests that went on from it."""
    saved_tokens: int = 0
    """The gap at each hit, added up: what these requests would have computed again without it."""

    def count_hit(self) -> None:
        """A request goes on from it."""
        self.hits += 1
        self.saved_tokens += self.gap

    @property
    def gap(self) -> int:
        """Tokens that must be computed again if this checkpoint is missing when it is wanted."""
        return self.depth - (self.parent.depth if self.parent is not None else 0)

    @property
    def role(self) -> Role:
        """Role by the number of deeper checkpoints."""
        if not self.children:
            return Role.TIP
        if len(self.children) > 1:
            return Role.FORK
        (child,) = self.children.values()
        return Role.SUPERSEDED if child.children else Role.PROMPT_END
