"""SGLang's KV component with a joint choice: KV that no state can use goes first, then the least valuable pairs."""

from __future__ import annotations

import math
from typing import Any

from k3_sglang.cache.keys import NodeKey, insert_without_copies
from k3_sglang.compat import ComponentType, FullComponent


class JointKVComponent(FullComponent):
    """Upstream's component for attention KV; only the order in which leaves are dropped is ours.

    A leaf without a state is dead weight: a request that matched it would compute it again. Among leaves with a state
    the one with the least expected saving per token of KV goes first.
    """

    def __init__(self, cache: Any, params: Any) -> None:
        super().__init__(cache, params)
        cache.insert = insert_without_copies(cache.insert)

    def commit_insert_component_data(
        self, node: Any, is_new_leaf: bool, params: Any, result: Any, cache_actions: Any
    ) -> None:
        super().commit_insert_component_data(node, is_new_leaf, params, result, cache_actions)
        if is_new_leaf:
            node.key = NodeKey.of(node.key)

    def _ensure_eviction_strategy(self) -> None:
        self.session_ref_eviction_strategy = self._joint_order

    def _joint_order(self, node: Any) -> tuple[int, float, int]:
        states: Any = self.cache.components.get(ComponentType.MAMBA)
        index = states.index if states is not None else None
        checkpoint = index.get(node.id) if index is not None else None
        if index is None or checkpoint is None:
            return 0, float(node.last_access_time), node.id
        pinned = checkpoint.pinned_until_s > index.clock_s
        return 2 if pinned else 1, index.score(checkpoint) - math.log2(len(node.key)), node.id
