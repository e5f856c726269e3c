"""What the models of other engines' caches have in common: one memory pool, a radix tree, running requests.

A model counts the bytes of KV and states against ``Budget.total_bytes``, running requests included, and serves the
same steps as the real caches. Positions are units of ``Budget.grain`` tokens. The models themselves are in ``engines``.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from k3_sglang.cache.replay.budget import Budget
from k3_sglang.cache.replay.driver import BudgetError, Served
from k3_sglang.cache.replay.schedule import Step
from k3_sglang.cache.replay.tree import UNIT_BYTES, Node, Tree


@dataclass(frozen=True)
class Found:
    """Match of one prompt, units."""

    hit: int
    """Deepest legal position with KV and state."""
    node: Node | None
    kv: int
    """How far KV alone reaches."""


@dataclass(eq=False)
class Running:
    """A request between its prefill and the end of its answer."""

    step: Step
    path: bytes
    hit_node: Node | None
    deepest: Node | None = None
    """End of the part of its path that is in the tree; it and all above it are pinned."""


Want = Literal["state", "kv", "any"]
"""What must become free."""


class ModelCache(ABC):
    """One model; subclasses say where states are kept and which victim goes next."""

    name = ""
    states_per_request = 1
    """State slots a running request occupies besides those of the tree."""
    cuts_prefill = False
    """Whether each kept state ends a forward pass of its own."""
    holds_states = False
    """Whether a running request keeps all states on its path from being evicted, not only the one it resumed from."""

    def __init__(self, budget: Budget, *, divided: bool = False) -> None:
        self.budget = budget
        self.divided = divided
        """States and KV have pools of fixed size as in SGLang; otherwise they share one of the same bytes."""
        self.tree = Tree()
        self.clock = 0
        self.running: list[Running] = []
        self.unit_bytes = budget.kv_token_bytes * budget.grain

    # --- the model's rules ---------------------------------------------------------------------------------------

    @abstractmethod
    def keep(self, found: Found, prompt_len: int) -> list[tuple[int, str]]:
        """Positions inside the prompt, beyond the hit, whose states are kept, with the reason."""

    def keep_at_finish(self, prompt_len: int, path_len: int) -> list[tuple[int, str]]:
        """Positions inside the answer whose states are kept."""
        return []

    def legal(self, depth: int) -> bool:
        """Whether a hit may end at ``depth``."""
        return True

    @abstractmethod
    def evict(self, excess: int, want: Want) -> bool:
        """Make the next eviction, towards ``excess`` bytes; False when nothing may be evicted."""

    def states_of(self, step: Step) -> int:
        """States that cannot be evicted while the step runs: its own and the one it resumed from."""
        del step
        return self.states_per_request + 1

    def touched(self, path: Sequence[Node], state: Node | None) -> None:
        """A request used these nodes' KV and, if given, this state."""
        for node in path:
            node.stamp = self.clock
        if state is not None:
            state.state_stamp = self.clock

    def created(self, node: Node) -> None:
        """A state was kept at this node; models with an order of eviction note it."""
        del node

    # --- serving -------------------------------------------------------------------------------------------------

    def serve(self, step: Step) -> tuple[Running, Served]:
        """Prefill of one step."""
        grain = self.budget.grain
        self.clock += 1
        path = step.units(grain).tobytes()
        prompt_len = step.prompt_tokens // grain
        prompt = path[: prompt_len * UNIT_BYTES]
        found = self.find(prompt, max(step.prompt_tokens - 1, 0) // grain)
        running = Running(step, path, found.node)
        self.running.append(running)
        self._pin(running, prompt[: found.hit * UNIT_BYTES])
        if found.node is not None:
            self.touched(_ancestry(running.deepest), found.node)
        keep = self.keep(found, prompt_len)
        self._extend(running, prompt, keep)
        passes = -(-(prompt_len - found.hit) // self.budget.units(self.budget.chunk))
        cuts = len({depth for depth, _ in keep} - {prompt_len}) if self.cuts_prefill else 0
        return running, Served(step.prompt_tokens, found.hit * grain, found.kv * grain, max(passes, 1) + cuts)

    def finish(self, running: Running) -> None:
        """The answer's KV goes in, the request's own memory comes back."""
        grain = self.budget.grain
        prompt_len = running.step.prompt_tokens // grain
        self.clock += 1
        self._extend(running, running.path, self.keep_at_finish(prompt_len, len(running.path) // UNIT_BYTES))
        self.running.remove(running)
        for node in _ancestry(running.deepest):
            node.pins -= 1

    def find(self, prompt: bytes, limit: int) -> Found:
        """Deepest legal state on the prompt, at most ``limit``."""
        nodes, kv = self.tree.walk(prompt)
        for node in reversed(nodes):
            if node.state and node.depth <= limit and self.legal(node.depth):
                return Found(node.depth, node, kv)
        return Found(0, None, kv)

    def _extend(self, running: Running, path: bytes, keep: list[tuple[int, str]]) -> None:
        present = self.tree.walk(path)[1]
        fresh = len(path) // UNIT_BYTES - present
        self._make_room(fresh * self.unit_bytes, "kv", running.step)
        self.tree.insert(path)
        self._pin(running, path)
        for depth, kind in keep:
            node = self.tree.node_at(path, depth)
            if node is None or node.state:
                continue
            if not self._make_room(self.budget.state_bytes, "state", None):
                continue
            self._pin(running, path)
            self.tree.set_state(node, kind, self.clock)
            self.created(node)
        self.touched(_ancestry(running.deepest), None)

    def _pin(self, running: Running, path: bytes) -> None:
        for node in _ancestry(running.deepest):
            node.pins -= 1
        nodes = self.tree.walk(path)[0]
        running.deepest = nodes[-1] if nodes else None
        for node in nodes:
            node.pins += 1

    def _excess(self, need: int, of: Want) -> int:
        """Bytes by which ``need`` more would be too much."""
        states = (self.tree.num_states + len(self.running) * self.states_per_request) * self.budget.state_bytes
        kv = self.tree.kv_units * self.unit_bytes
        if not self.divided:
            return states + kv + need - self.budget.total_bytes
        if of == "state":
            return states + need - self.budget.states * self.budget.state_bytes
        return kv + need - self.budget.kv_tokens * self.budget.kv_token_bytes

    def _make_room(self, need: int, of: Want, must: Step | None) -> bool:
        want: Want = of if self.divided else "any"
        while (excess := self._excess(need, of)) > 0:
            if self.evict(excess, want):
                continue
            if self.holds_states and must is not None:
                # Longer than the pool could hold with all its states: it loses them instead of failing.
                self.holds_states = False
                done = self.evict(excess, want)
                self.holds_states = True
                if done:
                    continue
            if must is not None:
                raise BudgetError(
                    f"{self.name}: a request of {must.path_tokens} tokens does not fit into "
                    f"{self.budget.total_bytes / 1e9:.1f} GB beside {len(self.running) - 1} running ones"
                )
            return False
        return True


def _ancestry(node: Node | None) -> list[Node]:
    """The node and all above it, from the root's child down. Edges cut in the meantime are included."""
    nodes: list[Node] = []
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


Entry = tuple[tuple[float, ...], int, Node]
"""Rank, serial number, node."""


class RankedCache(ModelCache):
    """Victims in the order of a key that only changes when something is used: a heap with stale entries skipped."""

    def __init__(self, budget: Budget, *, divided: bool = False) -> None:
        super().__init__(budget, divided=divided)
        self._heaps: dict[bool, list[Entry]] = {True: [], False: []}
        """Entries of states and of KV."""
        self._pushed = 0

    @abstractmethod
    def rank(self, node: Node, state: bool) -> tuple[float, ...]:
        """Order of eviction of a node's state or of its KV; smallest first."""

    def touched(self, path: Sequence[Node], state: Node | None) -> None:
        super().touched(path, state)
        if path and not path[-1].children:
            self._push(path[-1], False)
        if state is not None:
            self._push(state, True)

    def created(self, node: Node) -> None:
        self._push(node, True)

    def _push(self, node: Node, state: bool) -> None:
        self._pushed += 1
        heapq.heappush(self._heaps[state], (self.rank(node, state), self._pushed, node))

    def evict(self, excess: int, want: Want) -> bool:
        kinds = {"state": (True,), "kv": (False,), "any": (True, False)}[want]
        heads = [(entry, state) for state in kinds if (entry := self._candidate(state)) is not None]
        if not heads:
            return False
        (_, _, node), state = min(heads, key=lambda head: head[0][:2])
        if state:
            self.tree.drop_state(node)
        else:
            self._free_tail(node, excess)
        return True

    def _candidate(self, state: bool) -> Entry | None:
        """The first entry that may be evicted; it stays in the heap and is stale once its node is."""
        heap, kept = self._heaps[state], list[Entry]()
        found: Entry | None = None
        while heap and found is None:
            rank, _, node = entry = heapq.heappop(heap)
            if node.parent is None or rank != self.rank(node, state) or (state and not node.state):
                continue
            if node.pins and (not state or self.holds_states or self._is_source(node)):
                kept.append(entry)
            elif state or not node.children:
                found = entry
            # An inner node's KV is looked at again when its last child has gone.
        for entry in kept if found is None else (*kept, found):
            heapq.heappush(heap, entry)
        return found

    def _is_source(self, node: Node) -> bool:
        return any(run.hit_node is node for run in self.running)

    def _free_tail(self, node: Node, excess: int) -> None:
        """Free a leaf from its end, no more than needed."""
        units = -(-excess // self.unit_bytes)
        if units < node.units:
            self.tree.cut_leaf(node, units)
            self._push(node, False)
            return
        parent = node.parent
        self.tree.drop_leaf(node)
        if parent is not None and parent.parent is not None and not parent.children:
            self._push(parent, False)


def replay_model(
    model: ModelCache, steps: Iterable[Step], *, serial: bool, on_step: Callable[[Step, Served], None] | None = None
) -> list[Served]:
    """Serve every step in order, with running requests overlapping as in :func:`driver.replay`."""
    running: list[tuple[float, int, Running]] = []
    results: list[Served] = []
    now = 0.0
    for step in steps:
        now = max(now, step.start)
        while running and (running[0][0] <= now or serial or _must_wait(model, running, step)):
            end, _, run = heapq.heappop(running)
            now = max(now, end if not serial else now)
            model.finish(run)
        run, served = model.serve(step)
        heapq.heappush(running, (now + step.end - step.start, step.index, run))
        results.append(served)
        if on_step is not None:
            on_step(step, served)
    while running:
        model.finish(heapq.heappop(running)[2])
    return results


def _must_wait(model: ModelCache, running: list[tuple[float, int, Running]], step: Step) -> bool:
    budget = model.budget
    kv = (sum(run.step.path_tokens for _, _, run in running) + step.path_tokens) * budget.kv_token_bytes
    states = (sum(model.states_of(run.step) for _, _, run in running) + model.states_of(step)) * budget.state_bytes
    if any(run.step.session == step.session and run.step.stream == step.stream for _, _, run in running):
        return True
    if model.divided:
        return kv > budget.kv_tokens * budget.kv_token_bytes or states > budget.states * budget.state_bytes
    return kv + states > budget.total_bytes
