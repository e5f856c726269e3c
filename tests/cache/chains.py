"""Paths of checkpoints for the policy's tests."""

from k3_sglang.cache.policy import CheckpointIndex
from k3_sglang.cache.types import Checkpoint


def chain(index: CheckpointIndex, first_key: int, depths: list[int], session: str | None = None) -> list[Checkpoint]:
    """Checkpoints of one path, each deeper than the one before."""
    made: list[Checkpoint] = []
    for i, depth in enumerate(depths):
        made.append(index.add(first_key + i, depth, made[-1].key if made else None, session=session))
    return made
