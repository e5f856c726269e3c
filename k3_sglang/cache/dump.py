"""The tree as JSON for an inspector: nodes, their KV, their checkpoints and what each checkpoint is worth now."""

from __future__ import annotations

from collections import deque
from typing import Any


def dump(states: Any) -> dict[str, Any]:
    """Plain values of the whole tree of a :class:`~k3_sglang.cache.component.CheckpointComponent`.

    Returns:
        ``nodes`` from the root down (a parent comes before its children), ``slots``, ``stored_slots`` (None when
        checkpoints lie among ``slots``), ``tick``, ``reuse_interval`` in requests, ``checkpoint_bytes`` of one state
        and ``kv_token_bytes`` of one token's KV on this rank, and ``metrics``.
    """
    index = states._index()
    root = states.tree_core.root_node
    nodes: list[dict[str, Any]] = []
    waiting = deque((child, None, 0) for child in root.children.values())
    while waiting:
        node, parent, start = waiting.popleft()
        end = start + len(node.key)
        nodes.append(
            {
                "id": node.id,
                "parent": parent,
                "start": start,
                "end": end,
                "kv": not node.evicted,
                "checkpoint": _checkpoint(index, node.id),
            }
        )
        waiting.extend((child, node.id, end) for child in node.children.values())
    pool = states.cache.req_to_token_pool
    store = getattr(pool, "mamba_ckpt_pool", None)
    stored = None if store is None else {"total": store.num_slots, "free": int(store.available_size())}
    return {
        "nodes": nodes,
        "slots": {"total": int(pool.mamba_pool.size), "free": int(pool.mamba_allocator.available_size())},
        "stored_slots": stored,
        "tick": index.tick,
        "reuse_interval": index.pause,
        "checkpoint_bytes": _state_bytes(pool) if store is None else int(store.bytes_per_slot),
        "kv_token_bytes": _kv_token_bytes(states.cache.token_to_kv_pool_allocator.get_kvcache()),
        "metrics": states.metrics.as_json(),
    }


def _state_bytes(pool: Any) -> int:
    """Bytes of one slot of the running states: recurrent state and convolution windows of all layers."""
    held = pool.mamba_pool.mamba_cache
    return int(held.temporal[:, 0].nbytes + sum(window[:, 0].nbytes for window in held.conv))


def _kv_token_bytes(pool: Any) -> float:
    """Bytes of one token in all attention layers."""
    sizes = pool.get_kv_size_bytes()
    total = sum(sizes) if isinstance(sizes, tuple) else sizes
    return float(total) / (pool.size + pool.page_size)


def _checkpoint(index: Any, key: int) -> dict[str, Any] | None:
    checkpoint = index.get(key)
    if checkpoint is None:
        return None
    return {
        "role": checkpoint.role.value,
        "gap": checkpoint.gap,
        "score": index.score(checkpoint),
        "age": index.tick - checkpoint.last_use,
        "hits": checkpoint.hits,
        "saved_tokens": checkpoint.saved_tokens,
        "session": checkpoint.session,
        "locked": checkpoint.locked,
        "declared": checkpoint.declared,
        "released": checkpoint.released,
        "left": checkpoint.left,
        "pinned": checkpoint.pinned_until_s > index.clock_s,
    }
