"""SGLang's state component with an index of its checkpoints beside the radix tree, and victims chosen by value.

The tree, its locks, host tiers and allocators are upstream's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

from k3_sglang.cache.chances import EvictionSettings
from k3_sglang.cache.metrics import Metrics
from k3_sglang.cache.misses import Misses
from k3_sglang.cache.policy import CheckpointIndex
from k3_sglang.cache.types import Limit
from k3_sglang.compat import (
    CacheTransferPhase,
    ComponentType,
    EvictLayer,
    InternalStateBackup,
    MambaComponent,
)

logger = logging.getLogger(__name__)


class IndexedComponent(MambaComponent):
    """Upstream's component, with a record of every checkpoint and of what was dropped."""

    eviction = EvictionSettings()

    def __init__(self, cache: Any, params: Any) -> None:
        super().__init__(cache, params)
        self.index = CheckpointIndex(self.eviction)
        self.metrics = Metrics()
        self.misses = Misses()
        self._root: Any = None
        self._tried: set[int] = set()

    def commit_hicache_transfer(self, node: Any, phase: Any, transfers: Any = (), **further: Any) -> None:
        super().commit_hicache_transfer(node, phase, transfers, **further)
        if phase == CacheTransferPhase.LOAD_BACK and self._holds_state(node) and node.id not in self._index():
            self._add(node, None)

    # --- dropping -------------------------------------------------------------------------------------------------

    def evict_component(
        self, node: Any, device_frees: Any, host_frees: Any, cache_actions: Any, target: Any = EvictLayer.DEVICE
    ) -> tuple[int, int]:
        freed = super().evict_component(node, device_frees, host_frees, cache_actions, target)
        if not self._holds_state(node) and node.id in self.index:
            self.index.remove(node.id)
            self.misses.state_dropped(node.id)
            if not self.is_evict_device_ongoing:
                self.metrics.dropped_with_kv += 1
        return freed

    def discard_deleted_session_leaf(self, node: Any) -> None:
        super().discard_deleted_session_leaf(node)
        self.misses.text_gone(node.parent.id, node.key.token_ids, Limit.EVICTED)
        self.misses.node_removed(node.id)

    def _evict_device_start(self, request_cnt: int) -> None:
        self._evict_device_request_cnt = request_cnt
        self._evict_device_cursor = None
        self._tried = set()
        if len(self._index()) != len(self.tree_core.lru_lists[self.component_type].cache):
            self.metrics.resynchronised += 1
            logger.error("the checkpoint index lost step with the tree and was rebuilt; please report this")
            self._resynchronise()

    def _evict_device_next_node(self, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: Any) -> Any:
        core, kind = self.tree_core, self.component_type
        if tracker[kind] >= self._evict_device_request_cnt:
            return None
        victim = self.index.victim(spared=self._tried)
        if victim is None:
            return None
        self._tried.add(victim.key)
        self.metrics.evicted[victim.role] += 1
        node = core.node_by_id(victim.key)
        if node in core.evictable_device_leaves:
            return node.id
        data = node.component_data[kind]
        kv_on_device = node.component_data[ComponentType.FULL].value is not None
        write_back = core.enable_hicache and core.is_write_back
        if write_back and data.host_value is None and not node.backuped and kv_on_device:
            return InternalStateBackup(node_id=node.id, num_tokens=1)
        frees = {"device_frees": device_frees, "host_frees": host_frees, "cache_actions": cache_actions}
        core._evict_component_and_detach_lru(node, self, target=EvictLayer.DEVICE, tracker=tracker, **frees)
        core._cascade_evict(node, self, tracker, **frees)
        return None

    def _evict_device_end(self) -> None:
        self._evict_device_cursor = None
        self._tried = set()

    def acquire_component_lock(self, node: Any, result: Any, lock_host: bool = False) -> Any:
        result = super().acquire_component_lock(node, result, lock_host)
        self._copy_lock(node)
        return result

    def release_component_lock(self, node: Any, params: Any, lock_host: bool = False) -> None:
        super().release_component_lock(node, params, lock_host)
        self._copy_lock(node)

    # --- index ----------------------------------------------------------------------------------------------------

    def _index(self) -> CheckpointIndex:
        """The index of the present tree; a flush makes a new root."""
        if self.tree_core.root_node is not self._root:
            self._root = self.tree_core.root_node
            self.index.clear()
            self.misses.clear()
        return self.index

    def _holds_state(self, node: Any) -> bool:
        return node.component_data[self.component_type].value is not None

    def _copy_lock(self, node: Any) -> None:
        if node.id in self._index():
            self.index.set_locked(node.id, node.component_data[self.component_type].lock_ref > 0)

    def _add(self, node: Any, session: str | None) -> None:
        above, depth = node.parent, len(node.key)
        while above is not self._root and above.id not in self.index:
            depth += len(above.key)
            above = above.parent
        parent = None if above is self._root else above.id
        if parent is not None:
            depth += self.index.get(parent).depth  # type: ignore[union-attr]
        self.index.add(node.id, depth, parent, self._next_below(node), session=session)
        self._copy_lock(node)

    def _next_below(self, node: Any) -> Iterator[int]:
        """Checkpoints below a node that have none in between."""
        waiting = deque(node.children.values())
        while waiting:
            below = waiting.popleft()
            if below.id in self.index:
                yield below.id
            else:
                waiting.extend(below.children.values())

    def _resynchronise(self) -> None:
        self.index.clear()
        waiting = deque(self.tree_core.root_node.children.values())
        while waiting:
            node = waiting.popleft()
            if self._holds_state(node):
                self._add(node, None)
            waiting.extend(node.children.values())
