"""A bound no cache can beat: the least prompt tokens computed when all future requests are known.

Definition. Requests are served in the order of the load. A request may resume at any position that an earlier path
(prompt or answer) shares with its prompt, if a state at that position and the KV up to it were held ever since the
*last* earlier request whose path contains the position. While a request m runs, the states held for later ones take at
most the slots minus one (m's own), and their KV at most the pool minus m's path; KV needed by several later requests is
charged to the next of them only.

Why it is a bound. Everything a real cache does satisfies these rules, and more is allowed here: every position may
become a checkpoint, also where the prefill resumed deeper and never computed that state, with no extra pass and no
grid; answers can be reused from the moment their request begins; of several running requests only one is charged. Two
limits: the order of requests is the load's (a cache that reorders them is not covered), and positions are multiples of
``grain``, as in every other row of the same replay.

How it is computed. The optimum under these rules is an integer program. Its Lagrangian dual (a price per running
request and resource) is an upper bound of the tokens saved for *any* non-negative prices, so what is reported as
``computed_tokens`` is a true lower bound however far the price iteration has come. ``plan_tokens`` comes from a
feasible plan found with the same prices: the optimum lies between the two, which shows how tight the bound is. The plan
itself is not achievable by a real cache in general (it uses the same relaxed rules).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from k3_sglang.cache.replay.budget import Budget
from k3_sglang.cache.replay.schedule import Step
from k3_sglang.cache.replay.tree import UNIT_BYTES, Tree

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Bound:
    """Prompt tokens that must be computed: at least ``computed_tokens``, and ``plan_tokens`` suffice."""

    computed_tokens: float
    plan_tokens: float
    unlimited_tokens: int
    """Needed even with unlimited memory."""


@dataclass(frozen=True)
class Options:
    """Where each request could resume, as parallel arrays ordered by request and depth.

    Option k of request i: resume at ``depth`` units, held since request ``since``. Its KV is that of the options up to
    it, each piece held since its own ``since``.
    """

    request: Ints
    since: Ints
    depth: Ints
    piece: Ints
    """Units between this option's depth and the previous one's."""
    first: Ints
    """Index of the first option of each request, and one past the end."""
    path: Ints
    """Units of each request's whole path."""
    prompt_tokens: Ints
    grain: int


@dataclass(frozen=True)
class Resource:
    """A pool: what a held state and a held unit of KV take of it, and what is free while each request runs."""

    per_state: float
    per_unit: float
    free: Floats


def find_options(steps: Sequence[Step], grain: int) -> Options:
    """For every request the positions where the set of earlier paths that share its prompt changes."""
    tree = Tree()
    rows: list[tuple[int, int, int, int]] = []
    first = [0]
    paths: list[int] = []
    for number, step in enumerate(steps):
        path = step.units(grain).tobytes()
        paths.append(len(path) // UNIT_BYTES)
        limit = max(step.prompt_tokens - 1, 0) // grain
        rows += _records(tree, path[: limit * UNIT_BYTES], number)
        first.append(len(rows))
        for node in tree.insert(path):
            node.stamp = number
    table = np.asarray(rows, np.int64).reshape(-1, 4)
    return Options(
        request=table[:, 0],
        since=table[:, 1],
        depth=table[:, 2],
        piece=table[:, 3],
        first=np.asarray(first, np.int64),
        path=np.asarray(paths, np.int64),
        prompt_tokens=np.asarray([step.prompt_tokens for step in steps], np.int64),
        grain=grain,
    )


def _records(tree: Tree, prompt: bytes, number: int) -> list[tuple[int, int, int, int]]:
    nodes, matched = tree.walk(prompt)
    ends = [(node.depth, int(node.stamp)) for node in nodes]
    if matched > (ends[-1][0] if ends else 0):
        parent = nodes[-1] if nodes else tree.root
        at = parent.depth * UNIT_BYTES
        ends.append((matched, int(parent.children[prompt[at : at + UNIT_BYTES]].stamp)))
    rows: list[tuple[int, int, int, int]] = []
    before = 0
    for place, (depth, since) in enumerate(ends):
        if place + 1 < len(ends) and ends[place + 1][1] == since:
            continue
        rows.append((number, since, depth, depth - before))
        before = depth
    return rows


def split_pools(budget: Budget, options: Options) -> list[Resource]:
    """States and KV in pools of fixed size, as SGLang divides its memory."""
    count = len(options.path)
    kv = budget.kv_tokens // budget.grain - options.path
    return [
        Resource(1.0, 0.0, np.full(count, budget.states - 1.0)),
        Resource(0.0, 1.0, np.maximum(kv, 0).astype(np.float64)),
    ]


def one_pool(budget: Budget, options: Options) -> list[Resource]:
    """The same bytes in one pool; amounts in units of one state."""
    unit = budget.kv_token_bytes * budget.grain / budget.state_bytes
    free = budget.total_bytes / budget.state_bytes - 1.0 - options.path * unit
    return [Resource(1.0, unit, np.maximum(free, 0.0))]


def clairvoyant_bound(
    options: Options,
    resources: Sequence[Resource],
    *,
    iterations: int = 400,
    on_iteration: Callable[[], None] | None = None,
) -> Bound:
    """Bound for one budget; deterministic.

    Args:
        options: From :func:`find_options`, the same for every budget.
        resources: From :func:`split_pools` or :func:`one_pool`.
        iterations: Steps of the price iteration.
        on_iteration: Called after each step.
    """
    total = int(options.prompt_tokens.sum())
    deepest = np.zeros(len(options.path), np.int64)
    np.maximum.at(deepest, options.request, options.depth)
    unlimited = total - int(deepest.sum()) * options.grain
    prices = [np.zeros(len(options.path)) for _ in resources]
    saved, planned, reach = float("inf"), 0.0, 1.0
    for iteration in range(iterations):
        worth = _worth(options, resources, prices)
        chosen, dual = _best(options, worth)
        dual += sum(float(price @ pool.free) for price, pool in zip(prices, resources, strict=True))
        if dual < saved:
            saved = dual
        elif iteration % 20 == 19:
            reach *= 0.8
        if iteration % 25 == 0:
            planned = max(planned, _plan(options, resources, worth))
        used = [_usage(options, pool, chosen) for pool in resources]
        slack = [pool.free - use for pool, use in zip(resources, used, strict=True)]
        # A price that is zero and would fall further does not count.
        steep = [np.where((price <= 0) & (gap > 0), 0.0, gap) for price, gap in zip(prices, slack, strict=True)]
        norm = sum(float(gap @ gap) for gap in steep)
        if norm == 0.0:
            break
        stride = reach * max(dual - planned, 1.0) / norm
        prices = [np.maximum(price - stride * gap, 0.0) for price, gap in zip(prices, steep, strict=True)]
        if on_iteration is not None:
            on_iteration()
    return Bound(max(total - saved, unlimited), total - planned, unlimited)


def _before(values: Floats) -> Floats:
    """Sums of the values before each index, one longer than the values."""
    return np.concatenate([[0.0], np.cumsum(values)])


def _worth(options: Options, resources: Sequence[Resource], prices: Sequence[Floats]) -> Floats:
    """Tokens saved by each option minus what holding it costs."""
    state = _before(sum((pool.per_state * price for pool, price in zip(resources, prices, strict=True)), np.zeros(1)))
    unit = _before(sum((pool.per_unit * price for pool, price in zip(resources, prices, strict=True)), np.zeros(1)))
    start, end = options.since + 1, options.request
    pieces = _before(options.piece * (unit[end] - unit[start]))
    kv = pieces[1:] - pieces[options.first[options.request]]
    return options.depth * options.grain - (state[end] - state[start]) - kv


def _best(options: Options, worth: Floats) -> tuple[Ints, float]:
    """The best option of every request that has a worthwhile one, and the sum of their worth."""
    best = np.zeros(len(options.path))
    np.maximum.at(best, options.request, worth)
    winners = np.flatnonzero((worth > 0) & (worth >= best[options.request]))
    _, places = np.unique(options.request[winners], return_index=True)
    return winners[places], float(best.sum())


def _usage(options: Options, pool: Resource, chosen: Ints) -> Floats:
    """What the chosen options take of a pool while each request runs."""
    change = np.zeros(len(options.path) + 1)
    if pool.per_state:
        np.add.at(change, options.since[chosen] + 1, pool.per_state)
        np.add.at(change, options.request[chosen], -pool.per_state)
    if pool.per_unit:
        last = np.full(len(options.path), -1, np.int64)
        last[options.request[chosen]] = chosen
        held = np.flatnonzero(np.arange(len(options.request)) <= last[options.request])
        amount = options.piece[held] * pool.per_unit
        np.add.at(change, options.since[held] + 1, amount)
        np.add.at(change, options.request[held], -amount)
    return np.cumsum(change)[:-1]


def _plan(options: Options, resources: Sequence[Resource], worth: Floats) -> float:
    """Tokens saved by a feasible plan: options by worth, each taken if it still fits."""
    free = [pool.free.copy() for pool in resources]
    done = np.zeros(len(options.path), bool)
    saved = 0
    length = np.maximum(options.request - options.since - 1, 0)
    for option in np.lexsort((length, -worth)):
        request = int(options.request[option])
        if done[request]:
            continue
        parts = range(int(options.first[request]), int(option) + 1)
        if all(_fits(options, pool, room, int(option), parts) for pool, room in zip(resources, free, strict=True)):
            for pool, room in zip(resources, free, strict=True):
                room[options.since[option] + 1 : request] -= pool.per_state
                for part in parts if pool.per_unit else ():
                    room[options.since[part] + 1 : request] -= pool.per_unit * options.piece[part]
            done[request] = True
            saved += int(options.depth[option]) * options.grain
    return float(saved)


def _fits(options: Options, pool: Resource, room: Floats, option: int, parts: range) -> bool:
    request, earliest = int(options.request[option]), int(options.since[option]) + 1
    if earliest >= request:
        return True
    need = np.full(request - earliest, pool.per_state)
    for part in parts if pool.per_unit else ():
        need[int(options.since[part]) + 1 - earliest :] += pool.per_unit * options.piece[part]
    return bool((room[earliest:request] >= need).all())
