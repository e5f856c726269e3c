"""Checks that the checkpoint index tells the truth about the tree and nothing is lost; for tests and debugging."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from k3_sglang.cache.scheduling import states_of

CHECK_ENV = "K3_SGLANG_CACHE_CHECK"
"""``1``: compare whenever the engine is idle, and end it with a message when something is wrong. Walks the tree."""


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
        if data.value is not None and node.evicted and not core.enable_hicache:
            found.append(f"node {node.id}: a state without KV")
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


def idle_problems(states: Any) -> list[str]:
    """Of an engine without requests also: nothing is locked, and every slot and token is free or in the tree."""
    found, core = problems(states), states.tree_core
    rows, kv = states.cache.req_to_token_pool, states.cache.token_to_kv_pool_allocator
    store = getattr(rows, "mamba_ckpt_pool", None)
    cached = len(states._index())
    pools = [("slots", rows.mamba_allocator.available_size(), 0 if store else cached, rows.mamba_pool.size)]
    if store is not None:
        pools.append(("stored checkpoints", store.available_size(), cached, store.num_slots))
    for name, free, held, size in pools:
        if free + held != size:
            found.append(f"{free} {name} free and {held} cached of {size}")
    tokens = core.full_evictable_size()
    if kv.available_size() + tokens != kv.size:
        found.append(f"{kv.available_size()} tokens of KV free and {tokens} cached of {kv.size}")
    found += [f"checkpoint {checkpoint.key} is locked" for checkpoint in states._index() if checkpoint.locked]
    return found


def check_on_idle(scheduler: Any) -> None:
    """Before ``Scheduler.on_idle``, when :data:`CHECK_ENV` is 1.

    Raises:
        IntegrityError: with every disagreement found.
    """
    if os.environ.get(CHECK_ENV) != "1" or not scheduler.is_fully_idle():
        return
    states = states_of(scheduler.tree_cache)
    found = idle_problems(states) if states is not None else []
    if found:
        raise IntegrityError("; ".join(found))
