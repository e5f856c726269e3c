"""Models of vLLM, TokenSpeed and Marconi: which states they keep, what they can hit, who is evicted first.

Written from published sources and source text (versions in the docstrings); what each leaves out is said there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from k3_sglang.cache.replay.budget import Budget
from k3_sglang.cache.replay.models import Found, ModelCache, RankedCache, Want, replay_model
from k3_sglang.cache.replay.schedule import Step
from k3_sglang.cache.replay.tree import Node


class VllmAlign(RankedCache):
    """vLLM 0.33 ``align`` with ``--prefix-match-unit``: states at the prompt's end and at the shared-prefix junction.

    Modelled: match unit, junction floored to the attention block, no state of the answer, one LRU pool in which a
    request's tail is freed before its head, the running request's working state. Left out: block rounding of KV, the
    same-step deferral of hits, decode checkpoints of unmerged changes.
    """

    name = "vllm-align"
    cuts_prefill = True
    unit_tokens = 128
    block_tokens = 1536

    def keep(self, found: Found, prompt_len: int) -> list[tuple[int, str]]:
        unit, block = self.budget.units(self.unit_tokens), self.budget.units(self.block_tokens)
        junction = found.kv // block * block
        wanted = [(junction, "junction"), (prompt_len // unit * unit, "prompt end")]
        return [(depth, kind) for depth, kind in wanted if found.hit < depth <= prompt_len]

    def legal(self, depth: int) -> bool:
        return depth % self.budget.units(self.unit_tokens) == 0

    def rank(self, node: Node, state: bool) -> tuple[float, ...]:
        return (node.state_stamp if state else node.stamp, -node.depth, 0.0 if state else 1.0)


class VllmAll(VllmAlign):
    """vLLM's former ``all`` mode: a state at every attention block, of prompt and answer; hits end at blocks."""

    name = "vllm-all"
    cuts_prefill = False
    holds_states = True

    def states_of(self, step: Step) -> int:
        return self.states_per_request + step.path_tokens // self.block_tokens

    def keep(self, found: Found, prompt_len: int) -> list[tuple[int, str]]:
        block = self.budget.units(self.block_tokens)
        return [(depth, "block") for depth in range((found.hit // block + 1) * block, prompt_len + 1, block)]

    def keep_at_finish(self, prompt_len: int, path_len: int) -> list[tuple[int, str]]:
        block = self.budget.units(self.block_tokens)
        return [(depth, "block") for depth in range((prompt_len // block + 1) * block, path_len + 1, block)]

    def legal(self, depth: int) -> bool:
        return depth % self.budget.units(self.block_tokens) == 0


class TokenSpeed(RankedCache):
    """TokenSpeed 0.1's rule: a 128 grid, boundaries of three kinds, epochs of access, then unproven ones first.

    Modelled: a state per prefill chunk (probationary until a request resumes there), at the prompt's end, at the end of
    the answer (``floor128(len - 1)``) and where KV matched deeper than a state; the eviction key (access epoch, kind,
    position) with the deeper unproven boundary and the shallower KV kept. Left out: LCM blocks and their packing, the
    minimal victim set, host tier, partial-page tails and the sparser publication of later versions.
    """

    name = "tokenspeed"
    grid_tokens = 128

    def _floor(self, depth: int) -> int:
        grid = self.budget.units(self.grid_tokens)
        return depth // grid * grid

    def keep(self, found: Found, prompt_len: int) -> list[tuple[int, str]]:
        chunk = self.budget.units(self.budget.chunk)
        wanted = [(self._floor(found.kv), "promoted")]
        wanted += [(self._floor(depth), "chunk") for depth in range(found.hit + chunk, prompt_len, chunk)]
        wanted.append((self._floor(prompt_len), "endpoint"))
        return [(depth, kind) for depth, kind in wanted if found.hit < depth <= prompt_len]

    def keep_at_finish(self, prompt_len: int, path_len: int) -> list[tuple[int, str]]:
        depth = self._floor(path_len)
        return [(depth, "endpoint")] if depth > prompt_len else []

    def touched(self, path: Sequence[Node], state: Node | None) -> None:
        if state is not None and state.kind == "chunk":
            state.kind = "acquired"
        super().touched(path, state)

    def rank(self, node: Node, state: bool) -> tuple[float, ...]:
        if not state:
            return (node.stamp, 3.0, -node.depth)
        return (node.state_stamp, 1.0, node.depth) if node.kind == "chunk" else (node.state_stamp, 2.0, 0.0)


class Marconi(ModelCache):
    """Marconi's published policy: states at branch points and at the last decoded token, FLOP-aware eviction.

    Admission: the position where a new prompt leaves the tree, and the end of the answer. Eviction: the smallest
    ``norm(1 / age) + alpha * norm(FLOPs saved over the parent / bytes)`` among nodes with at most one child, both terms
    scaled to [0, 1] over the candidates; an inner node loses its state only. Only the node that was hit is refreshed.
    ``alpha`` is tuned by replaying the first part of the load (see :func:`tuned_marconi`).
    """

    name = "marconi"

    def __init__(
        self, budget: Budget, flops: Callable[[int, int], float], alpha: float, *, divided: bool = False
    ) -> None:
        super().__init__(budget, divided=divided)
        self.flops = flops
        self.alpha = alpha

    def keep(self, found: Found, prompt_len: int) -> list[tuple[int, str]]:
        return [(found.kv, "branch")] if found.hit < found.kv < prompt_len else []

    def keep_at_finish(self, prompt_len: int, path_len: int) -> list[tuple[int, str]]:
        return [(path_len, "end")]

    def touched(self, path: Sequence[Node], state: Node | None) -> None:
        if state is not None:
            state.stamp = state.state_stamp = self.clock
        for node in path:
            node.stamp = node.stamp or self.clock

    def evict(self, excess: int, want: Want) -> bool:
        hit = {id(run.hit_node) for run in self.running}
        candidates = [
            node
            for node in self.tree.nodes()
            if not node.pins and (not node.children or (len(node.children) == 1 and node.state and id(node) not in hit))
            if want == "any" or (node.state if want == "state" else not node.children)
        ]
        if not candidates:
            return False
        grain = self.budget.grain
        recency = [1.0 / (self.clock + 1 - node.stamp) for node in candidates]
        worth = [
            self.flops(node.start * grain, node.depth * grain)
            / (node.units * self.unit_bytes + (self.budget.state_bytes if node.state else 0))
            for node in candidates
        ]
        scores = [r + self.alpha * w for r, w in zip(_scaled(recency), _scaled(worth), strict=True)]
        worst = candidates[scores.index(min(scores))]
        if worst.children:
            self.tree.drop_state(worst)
        else:
            self.tree.drop_leaf(worst)
        return True


def _scaled(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def tuned_marconi(
    budget: Budget,
    flops: Callable[[int, int], float],
    steps: Sequence[Step],
    *,
    serial: bool,
    divided: bool = False,
    alphas: Sequence[float] = (0.0, 0.25, 0.5, 1.0, 2.0),
    share: float = 0.1,
) -> Marconi:
    """Marconi with the ``alpha`` that computes least over the first ``share`` of the load."""
    first = steps[: max(int(len(steps) * share), 1)]

    def computed(alpha: float) -> int:
        model = Marconi(budget, flops, alpha, divided=divided)
        return sum(one.computed_tokens for one in replay_model(model, first, serial=serial))

    return Marconi(budget, flops, min(alphas, key=computed), divided=divided)
