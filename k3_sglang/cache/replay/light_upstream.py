"""SGLang's own decisions on the light tree: LRU of states and leaves, path cap, snapshots on a grid, two spare slots.

Both strategies: ``extra_buffer``, which a GPU gets, and ``no_buffer``. A test compares every hit with the real cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from k3_sglang.cache.replay.budget import Budget
from k3_sglang.cache.replay.driver import BudgetError
from k3_sglang.cache.replay.light import LightCache, LightNode, LightRequest
from k3_sglang.cache.replay.rig import CHECKPOINT_GRID, UpstreamFlags
from k3_sglang.cache.types import Role

SPARE_SLOTS = 2
"""Snapshot buffers of a running request with ``extra_buffer``."""


@dataclass(eq=False)
class Held:
    """A state in the tree."""

    key: int
    locked: bool = False
    role: Role = Role.TIP


class LruIndex:
    """The part of the index's interface that the light tree uses, by recency alone."""

    tick = 0
    clock_s = 0.0

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._held

    def get(self, key: int) -> Held | None:
        """The state of a node."""
        return self._held.get(key)

    def add(self, key: int, depth: int, parent: int | None, children: Iterable[int], *, session: str | None) -> None:
        """A new state is the most recent."""
        del depth, parent, children, session
        self._held[key] = Held(key)

    def use(self, key: int, session: str | None = None) -> float:
        """A used state becomes the most recent."""
        del session
        self._held[key] = self._held.pop(key)
        return 0.0

    def remove(self, key: int) -> None:
        """Forget a state."""
        del self._held[key]

    def set_locked(self, key: int, locked: bool) -> None:
        """A running request uses it, or no longer."""
        if key in self._held:
            self._held[key].locked = locked

    def victim(self) -> Held | None:
        """The least recent one that is not locked."""
        return next((held for held in self._held.values() if not held.locked), None)

    def begin_request(self, now_s: float | None = None) -> None:
        """Time is of no interest."""

    def observe_reuse(self, age: float) -> None:
        """Nor is patience."""


class LightUpstream(LightCache):
    """SGLang's cache with chosen flags."""

    def __init__(self, budget: Budget, flags: UpstreamFlags) -> None:
        super().__init__(budget, hinted=False, index=LruIndex())  # type: ignore[arg-type]
        self.cap = flags.max_states_per_path
        self.interval = budget.units(flags.track_interval)
        self.grid = budget.units(CHECKPOINT_GRID) if flags.extra_buffer else 1
        self.spare = SPARE_SLOTS if flags.extra_buffer else 0
        # The engine's own ratios, as in the rig.
        self.max_running = max(budget.states // (5 if flags.extra_buffer else 4), 1)
        self._fork: dict[int, int] = {}
        """Where each running request leaves KV that others computed."""
        self._all_leaves: list[tuple[float, int, LightNode]] = []

    def _chunks(self, req: LightRequest, hit: int, kv_hit: int) -> tuple[int, ...]:
        fork = kv_hit // self.grid * self.grid
        self._fork[id(req)] = fork if fork > hit else 0
        longest = self.budget.units(self.budget.chunk)
        return (*range(hit + longest, req.prompt_len, longest), req.prompt_len) if req.prompt_len > hit else ()

    def _take_slots(self, req: LightRequest) -> None:
        self._take(self.spare + (not req.has_slot))
        req.has_slot = True

    def _take(self, count: int) -> None:
        while self.free_slots < count:
            if not self._evict_state():
                raise BudgetError(f"no state slot among {self.budget.states} beside {len(self.running)} requests")
        self.free_slots -= count

    def _checkpoint(self, req: LightRequest, end: int, *, finished: bool) -> None:
        if finished:
            interval = self.interval if self.spare else 1
            kept = end // interval * interval
            donated = (kept > req.prompt_len or not self.spare) and self._donate(req, kept)
            self.free_slots += 1 + self.spare - donated
            self.free_kv += req.owned - max(req.in_tree, 0)
            req.owned = req.in_tree
            self._fork.pop(id(req))
            return
        begins, fork = req.computed, self._fork[id(req)]
        req.computed = end
        kept = begins + (end - begins) // self.grid * self.grid
        if kept == begins:
            return
        if self.spare and begins < fork < end and (fork - begins) % self.grid == 0:
            kept = fork
        self._take(1)
        donated = self._donate(req, kept)
        self.free_slots += not donated

    def _donate(self, req: LightRequest, end: int) -> bool:
        """Insert up to ``end`` with a state; whether the tree had none there."""
        node = self._insert(req, end)
        new = node.number not in self.index
        if new:
            self._add(node, None)
            self._drop_excess(node)
        else:
            self.index.use(node.number)
        self._lock(node)
        self._unlock(req.lock)
        req.lock, req.in_tree = node, end
        return new

    def _drop_excess(self, tail: LightNode) -> None:
        """The path cap: the shallowest states go, but not forks and what is in use."""
        if self.cap < 0:
            return
        holders: list[LightNode] = []
        at: LightNode | None = tail
        while at is not None:
            if at.number in self.index:
                holders.append(at)
            at = at.parent
        excess = len(holders) - self.cap
        for node in reversed(holders):
            if excess <= 0 or node is tail:
                break
            if not node.state_locks and len(node.children) == 1:
                self.index.remove(node.number)
                self.free_slots += 1
                excess -= 1

    def _note_leaf(self, node: LightNode) -> None:
        if not node.children and not node.locks and node.number:
            heapq.heappush(self._all_leaves, (node.touched, node.number, node))

    def _kv_victim(self) -> LightNode | None:
        """The leaf used longest ago, with or without a state."""
        while self._all_leaves:
            touched, number, node = self._all_leaves[0]
            if number in self._nodes and not node.children and not node.locks:
                if touched == node.touched:
                    return node
                self._note_leaf(node)
            heapq.heappop(self._all_leaves)
        return None
