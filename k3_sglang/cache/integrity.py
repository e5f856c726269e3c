"""Checks that the checkpoint index tells the truth about the tree; for tests and debugging."""

from __future__ import annotations

from collections import deque
from typing import Any


class IntegrityError(AssertionError):
    """The index and the tree disagree; the message lists how."""


def check_integrity(states: Any) -> None:
    """Compare the index of a :class:`~k3_sglang.cache.component.CheckpointComponent` with its tree.

    Raises:
        IntegrityError: with every disagreement found.
    """
    found = problems(states)
    if found:
        raise IntegrityError("; ".join(found))


def problems(states: Any) -> list[str]:
    """Disagreements between index and tree, empty when all is well. Walks the whole tree."""
    index, kind, core = states._index(), states.component_type, states.tree_core
    found: list[str] = []
    seen: set[int] = set()
    evictable = protected = 0
    waiting = deque((child, 0, None) for child in core.root_node.children.values())
    while waiting:
        node, depth, above = waiting.popleft()
        depth += len(node.key)
        data = node.component_data[kind]
        checkpoint = index.get(node.id)
        if (data.value is not None) != (checkpoint is not None):
            found.append(f"node {node.id}: state {data.value is not None}, indexed {checkpoint is not None}")
        if checkpoint is not None:
            seen.add(node.id)
            parent = checkpoint.parent.key if checkpoint.parent is not None else None
            if (checkpoint.depth, parent) != (depth, above):
                found.append(f"node {node.id}: at {depth} below {above}, indexed at {checkpoint.depth} below {parent}")
            if checkpoint.locked != (data.lock_ref > 0):
                found.append(f"node {node.id}: {data.lock_ref} locks, indexed locked={checkpoint.locked}")
            evictable, protected = evictable + (not checkpoint.locked), protected + checkpoint.locked
            above = node.id
        waiting.extend((child, depth, above) for child in node.children.values())
    found += [f"checkpoint {checkpoint.key} is not in the tree" for checkpoint in index if checkpoint.key not in seen]
    for checkpoint in index:
        for child in checkpoint.children.values():
            if child.parent is not checkpoint:
                found.append(f"checkpoint {child.key} does not hang on {checkpoint.key}")
    if (evictable, protected) != (core.mamba_evictable_size(), core.mamba_protected_size()):
        counted = f"{core.mamba_evictable_size()} evictable and {core.mamba_protected_size()} protected"
        found.append(f"{evictable} evictable and {protected} protected checkpoints, the tree counts {counted}")
    return found
