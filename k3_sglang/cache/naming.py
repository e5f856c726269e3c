"""Positions that a caller named, found again as checkpoints of a path: declared, or pinned for a while."""

from __future__ import annotations

from collections.abc import Mapping

from k3_sglang.cache.policy import CheckpointIndex


def declare_named(index: CheckpointIndex, key: int, named: Mapping[int, float], grid: int = 1) -> None:
    """Declare or pin the named positions of the path that ends at checkpoint ``key``, as far as they are kept.

    Whoever names a position again renews its pin, also when it was found in the cache.

    Args:
        named: seconds to pin by position in tokens, 0 for none. Pins need a clock, see
            :meth:`~k3_sglang.cache.policy.CheckpointIndex.begin_request`.
        grid: a checkpoint may lie up to this many tokens (less one) before the position it was made for.
    """
    left = sorted(named)
    here = index.get(key)
    while here is not None and left:
        while left and left[-1] >= here.depth:
            position = left.pop()
            if position - here.depth >= grid:
                continue
            if named[position] and index.clock_s:
                index.pin(here.key, max(here.pinned_until_s, index.clock_s + named[position]))
            else:
                index.declare(here.key)
        here = here.parent
