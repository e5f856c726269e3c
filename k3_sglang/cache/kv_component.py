"""SGLang's KV component with a joint choice: KV that no state can use goes first, then the least valuable pairs."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from k3_sglang.cache.keys import NodeKey, insert_without_copies
from k3_sglang.compat import ComponentType, FullComponent


class LeafSet(set[Any]):
    """The tree's set of leaves that may be dropped, and a list of those that came in since somebody looked."""

    def __init__(self, nodes: Iterable[Any] = ()) -> None:
        super().__init__(nodes)
        self.new: list[Any] = list(self)

    def add(self, node: Any) -> None:
        """A leaf became evictable; the tree says so again and again, only the first time counts."""
        if node in self:
            return
        super().add(node)
        self.new.append(node)
        if len(self.new) > 4 * len(self) + 256:  # nobody looks while there is room
            self.new = list(self)


class JointKVComponent(FullComponent):
    """Upstream's component for attention KV; only the order in which leaves are dropped is ours.

    A leaf without a state is dead weight: a request that matched it would compute it again; the one used longest ago
    goes first. Then all leaves are tips, and the index knows which of them is worth least per token of KV. No eviction
    looks at all leaves: new ones are told by the set itself.
    """

    def __init__(self, cache: Any, params: Any) -> None:
        super().__init__(cache, params)
        cache.insert = insert_without_copies(cache.insert)
        self._leaves = LeafSet()
        self._dead: list[tuple[float, int, Any]] = []
        """Leaves that had no state when they came in, by last use; checked when they come up."""
        self._tried: set[int] = set()

    def commit_insert_component_data(
        self, node: Any, is_new_leaf: bool, params: Any, result: Any, cache_actions: Any
    ) -> None:
        super().commit_insert_component_data(node, is_new_leaf, params, result, cache_actions)
        if is_new_leaf:
            node.key = NodeKey.of(node.key)

    def _evict_device_start(self, request_cnt: int) -> None:
        if self.tree_core.evictable_device_leaves is not self._leaves:  # the first time, and after a flush
            self._leaves = self.tree_core.evictable_device_leaves = LeafSet(self.tree_core.evictable_device_leaves)
            self._dead = []
        self._evict_device_request_cnt = request_cnt
        self._tried = set()

    def _evict_device_next_node(self, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: Any) -> Any:
        if tracker[self.component_type] >= self._evict_device_request_cnt:
            return None
        node = self._dead_leaf() or self._tip() or self._any_leaf()
        if node is None:
            return None
        self._tried.add(node.id)
        return node.id

    def _evict_device_end(self) -> None:
        self._tried = set()

    def _has_state(self, node: Any) -> bool:
        return node.component_data[ComponentType.MAMBA].value is not None

    def _dead_leaf(self) -> Any:
        """The evictable leaf without a state that was used longest ago."""
        while self._leaves.new:
            self._note(self._leaves.new.pop())
        while self._dead:
            used, _, node = self._dead[0]
            current = used == node.last_access_time
            if current and node in self._leaves and not self._has_state(node) and node.id not in self._tried:
                return node
            heapq.heappop(self._dead)
            if not current:
                self._note(node)
        return None

    def _note(self, node: Any) -> None:
        if node in self._leaves and not self._has_state(node):
            heapq.heappush(self._dead, (node.last_access_time, node.id, node))

    def _tip(self) -> Any:
        """The evictable tip whose KV is worth least."""
        states: Any = self.cache.components[ComponentType.MAMBA]
        while (tip := states.index.kv_victim(self._tried)) is not None:
            node = self.tree_core.node_by_id(tip.key)
            if node in self._leaves:
                return node
            self._tried.add(tip.key)  # dead weight in use hangs below it
        return None

    def _any_leaf(self) -> Any:
        """What the two orders do not know: pinned tips, and leaves that lost their state in place."""
        left = [node for node in self._leaves if node.id not in self._tried]
        return min(left, key=lambda node: (node.last_access_time, node.id), default=None)
