"""Our policy on a tree without an engine: the decisions of the real components, an order of magnitude faster.

The index of checkpoints, its scores and the cuts are the product's own objects. Only the tree, the pools and the locks
around them are written again, in the order in which SGLang's cache calls the components; a test compares every hit with
the real cache. Positions are units of ``Budget.grain`` tokens, pages are one unit, states lie at exact ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace

from k3_sglang.cache.chances import EvictionSettings
from k3_sglang.cache.hints import Hints
from k3_sglang.cache.naming import declare_named
from k3_sglang.cache.placement import PlacementSettings, Reason, Wanted, plan_chunks
from k3_sglang.cache.policy import CheckpointIndex
from k3_sglang.cache.replay.budget import Budget
from k3_sglang.cache.replay.driver import BudgetError, Served
from k3_sglang.cache.replay.hinting import step_hints
from k3_sglang.cache.replay.schedule import Step
from k3_sglang.cache.replay.tree import UNIT_BYTES, common_bytes
from k3_sglang.cache.types import Role

SLOTS_PER_REQUEST = 2
"""Working state and the checkpoint it was copied from."""


class LightNode:
    """An edge of the tree. Unlike the models' tree this one is never merged: evictions go edge by edge as in SGLang."""

    __slots__ = ("children", "depth", "key", "locks", "number", "parent", "state_locks", "touched")

    def __init__(self, number: int, key: bytes, depth: int, parent: LightNode | None) -> None:
        self.number = number
        self.key = key
        self.depth = depth
        """Units from the root to the end of this edge."""
        self.parent = parent
        self.children: dict[bytes, LightNode] = {}
        self.locks = 0
        """Running requests whose path contains this edge."""
        self.state_locks = 0
        """Running requests that hold the checkpoint at its end."""
        self.touched = 0.0

    @property
    def units(self) -> int:
        """KV of the edge."""
        return len(self.key) // UNIT_BYTES


@dataclass(eq=False)
class LightRequest:
    """A running request and what it holds."""

    step: Step
    path: bytes
    prompt_len: int
    hints: Hints
    session: str | None
    lock: LightNode | None = None
    in_tree: int = 0
    """Units of its path whose KV belongs to the tree; the rest of ``owned`` is its own."""
    owned: int = 0
    computed: int = 0
    """Where its next chunk begins."""
    has_slot: bool = False
    reuse_age: float | None = None
    counted: bool = False


class LightCache:
    """Tree, two pools and the index; ``serve`` and ``finish`` are what the engine would do."""

    def __init__(
        self,
        budget: Budget,
        *,
        hinted: bool,
        index: CheckpointIndex | None = None,
        placement: PlacementSettings | None = None,
    ) -> None:
        placement = placement or PlacementSettings()
        self.budget = budget
        self.hinted = hinted
        self.placement = replace(placement, pass_tokens=budget.units(placement.pass_tokens))
        self.index = index if index is not None else CheckpointIndex(EvictionSettings())
        self.free_slots = budget.states
        self.free_kv = budget.kv_tokens // budget.grain
        self.max_running = max(budget.states // SLOTS_PER_REQUEST, 1)
        self.running: list[LightRequest] = []
        self._idle_kv = 0
        """KV in the tree that no running request uses."""
        self._clock = 0
        self._number = 0
        self.root = LightNode(0, b"", 0, None)
        self._nodes: dict[int, LightNode] = {}
        self._leaves: list[tuple[float, int, LightNode]] = []
        """Leaves that may have no checkpoint, by last use; checked when popped."""

    # --- engine ---------------------------------------------------------------------------------------------------

    def serve(self, step: Step) -> tuple[LightRequest, Served]:
        """Prefill: match, copy the state, extend by chunks with a checkpoint after each."""
        grain = self.budget.grain
        path = step.units(grain).tobytes()
        prompt_len = step.prompt_tokens // grain
        hints = Hints.from_custom_params(step_hints(step, grain) if self.hinted else None)
        req = LightRequest(step, path, prompt_len, hints, hints.session)
        hit, kv_hit = self._match(req, max(step.prompt_tokens - 1, 0) // grain)
        ends = self._chunks(req, hit, kv_hit)
        self.running.append(req)
        self._take_slots(req)
        req.in_tree = req.owned = req.computed = hit
        for end in ends:
            self._own(req, end)
            self._checkpoint(req, end, finished=False)
        self._own(req, len(path) // UNIT_BYTES)
        return req, Served(step.prompt_tokens, hit * grain, kv_hit * grain, max(len(ends), 1))

    def finish(self, req: LightRequest) -> None:
        """The live state becomes the checkpoint at the end of the answer."""
        self._checkpoint(req, len(req.path) // UNIT_BYTES, finished=True)
        self._unlock(req.lock)
        req.lock = None
        self.running.remove(req)

    def _chunks(self, req: LightRequest, hit: int, kv_hit: int) -> tuple[int, ...]:
        if hit >= req.prompt_len:
            return ()
        wanted = req.hints.wanted(hit, req.prompt_len)
        if kv_hit > hit:
            wanted.append(Wanted(kv_hit, Reason.FORK))
        return plan_chunks(hit, req.prompt_len, self.budget.units(self.budget.chunk), wanted, self.placement).ends

    # --- matching -------------------------------------------------------------------------------------------------

    def _match(self, req: LightRequest, limit: int) -> tuple[int, int]:
        """Hit and KV hit; the request then holds a lock and, on a hit, a slot."""
        nodes, kv_hit = self._walk(req.path[: limit * UNIT_BYTES])
        best = next((node for node in reversed(nodes) if node.number in self.index), None)
        if best is not None:
            age, role = self.index.use(best.number), self.index.get(best.number).role  # type: ignore[union-attr]
            req.reuse_age = age if role is Role.TIP else None
            node, now = best, self._now()
            while node is not None:
                node.touched = now
                node, now = node.parent, now - 1e-5
            self._lock(best)
            has_room = bool(self.free_slots) or self._evict_state()
            self.index.use(best.number, req.session)
            if has_room:
                self.free_slots -= 1
                req.has_slot, req.lock = True, best
                return best.depth, kv_hit
            self._unlock(best)
        req.lock = None
        return 0, kv_hit

    def _walk(self, path: bytes) -> tuple[list[LightNode], int]:
        """Edges on the path, the last one cut if only a part of it is, and how far KV goes."""
        nodes: list[LightNode] = []
        node, at = self.root, 0
        while at < len(path):
            child = node.children.get(path[at : at + UNIT_BYTES])
            if child is None:
                break
            if not path.startswith(child.key, at):
                child = self._split(child, common_bytes(child.key, path, at) // UNIT_BYTES)
            nodes.append(child)
            node, at = child, at + len(child.key)
        return nodes, at // UNIT_BYTES

    def _split(self, child: LightNode, units: int) -> LightNode:
        parent, cut = child.parent, units * UNIT_BYTES
        assert parent is not None and 0 < cut < len(child.key), "the cut must lie inside the edge"
        upper = self._node(child.key[:cut], parent)
        upper.locks = child.locks
        upper.touched, child.touched = self._now(), self._now()
        child.key, child.parent = child.key[cut:], upper
        upper.children[child.key[:UNIT_BYTES]] = child
        return upper

    def _node(self, key: bytes, parent: LightNode) -> LightNode:
        self._number += 1
        node = LightNode(self._number, key, parent.depth + len(key) // UNIT_BYTES, parent)
        self._nodes[node.number] = node
        parent.children[key[:UNIT_BYTES]] = node
        return node

    # --- keeping --------------------------------------------------------------------------------------------------

    def _checkpoint(self, req: LightRequest, end: int, *, finished: bool) -> None:
        if not req.counted:
            req.counted = True
            self.index.begin_request(req.hints.now_s)
            if req.reuse_age is not None:
                self.index.observe_reuse(req.reuse_age)
        key = None
        if finished or self.free_slots or self._evict_state():
            if not finished:
                self.free_slots -= 1
            node = self._insert(req, end)
            if node.number in self.index:
                self.index.use(node.number, req.session)
                self.free_slots += 1
            else:
                self._add(node, req.session)
            key = node.number
            declare_named(self.index, node.number, req.hints.named)
            self._lock(node)
            self._unlock(req.lock)
            req.lock, req.in_tree = node, end
        if finished:
            if key is not None and req.hints.wait_s is not None:
                self.index.expect(key, req.hints.wait_s)
            if req.hints.release and req.session is not None:
                self.index.release(req.session)

    def _insert(self, req: LightRequest, end: int) -> LightNode:
        """The request's KV up to ``end`` goes into the tree; what is there already is freed."""
        path = req.path[: end * UNIT_BYTES]
        nodes, present = self._walk(path)
        for node in nodes:
            node.touched = self._now()
        self.free_kv += max(present - req.in_tree, 0)
        if present == end:
            nodes[-1].touched = self._now()
            return nodes[-1]
        leaf = self._node(path[present * UNIT_BYTES :], nodes[-1] if nodes else self.root)
        self._idle_kv += leaf.units
        leaf.touched = self._now()
        return leaf

    def _now(self) -> float:
        self._clock += 1
        return float(self._clock)

    def _add(self, node: LightNode, session: str | None) -> None:
        above = node.parent
        while above is not None and above.number not in self.index:
            above = above.parent
        parent = above.number if above is not None else None
        self.index.add(node.number, node.depth, parent, self._next_below(node), session=session)

    def _next_below(self, node: LightNode) -> Iterator[int]:
        waiting = list(node.children.values())
        for below in waiting:
            if below.number in self.index:
                yield below.number
            else:
                waiting.extend(below.children.values())

    def _lock(self, node: LightNode) -> None:
        self.index.set_locked(node.number, True)
        node.state_locks += 1
        at: LightNode | None = node
        while at is not None:
            if not at.locks:
                self._idle_kv -= at.units
            at.locks += 1
            at = at.parent

    def _unlock(self, node: LightNode | None) -> None:
        if node is None:
            return
        node.state_locks -= 1
        if not node.state_locks:
            self.index.set_locked(node.number, False)
        at: LightNode | None = node
        while at is not None:
            at.locks -= 1
            if not at.locks:
                self._idle_kv += at.units
            at = at.parent
        self._note_leaf(node)

    # --- dropping -------------------------------------------------------------------------------------------------

    def _take_slots(self, req: LightRequest) -> None:
        if req.has_slot:
            return
        if not self.free_slots and not self._evict_state():
            raise BudgetError(f"no state slot among {self.budget.states} for a request beside {len(self.running) - 1}")
        self.free_slots -= 1
        req.has_slot = True

    def _evict_state(self) -> bool:
        victim = self.index.victim()
        if victim is None:
            return False
        node = self._nodes[victim.key]
        if node.children or node.locks:
            self.index.remove(victim.key)
            self.free_slots += 1
        else:
            self._drop_leaf(node)
        return True

    def _own(self, req: LightRequest, end: int) -> None:
        """KV of its own up to ``end``."""
        need = end - req.owned
        if need <= 0:
            return
        while self.free_kv < need:
            leaf = self._kv_victim()
            if leaf is None:
                raise BudgetError(f"{need} units of KV are missing for a request beside {len(self.running) - 1} others")
            self._drop_leaf(leaf)
        self.free_kv -= need
        req.owned = end

    def _kv_victim(self) -> LightNode | None:
        """The leaf without a checkpoint that was used longest ago, else the tip worth least per token of KV."""
        while self._leaves:
            touched, _, node = self._leaves[0]
            alive = node.number in self._nodes and not node.children and not node.locks
            if alive and node.number not in self.index and touched == node.touched:
                return node
            heapq.heappop(self._leaves)
            if alive and node.number not in self.index:
                self._note_leaf(node)
        tip = self.index.kv_victim()
        return self._nodes[tip.key] if tip is not None else None

    def _note_leaf(self, node: LightNode) -> None:
        if not node.children and not node.locks and node.number and node.number not in self.index:
            heapq.heappush(self._leaves, (node.touched, node.number, node))

    def _drop_leaf(self, node: LightNode) -> None:
        parent = node.parent
        assert parent is not None and not node.children and not node.locks, "only free leaves are dropped"
        if node.number in self.index:
            self.index.remove(node.number)
            self.free_slots += 1
        self.free_kv += node.units
        self._idle_kv -= node.units
        del self._nodes[node.number]
        del parent.children[node.key[:UNIT_BYTES]]
        self._note_leaf(parent)

    # --- admission ------------------------------------------------------------------------------------------------

    def fits(self, step: Step) -> bool:
        """Whether the step's KV can be found without touching what running requests hold."""
        return self.free_kv + self._idle_kv >= step.path_tokens // self.budget.grain + 2
