"""The clairvoyant bound against the true optimum of loads small enough to try everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.cache.replay.bound import (
    Bound,
    Options,
    Resource,
    clairvoyant_bound,
    find_options,
    one_pool,
    split_pools,
)
from k3_sglang.cache.replay.budget import Budget
from k3_sglang.cache.replay.schedule import Step
from tests.cache.replay.sessions import growing, session, steps_of


def most_saved(options: Options, pools: list[Resource]) -> int:
    """Tokens saved by the best choice of options, by trying all."""
    count = len(options.path)
    choices = [[None, *range(options.first[i], options.first[i + 1])] for i in range(count)]
    best = 0
    for choice in itertools.product(*choices):
        picked = [int(option) for option in choice if option is not None]
        fits = True
        for pool in pools:
            used = np.zeros(count)
            for option in picked:
                request = int(options.request[option])
                used[options.since[option] + 1 : request] += pool.per_state
                for piece in range(options.first[request], option + 1):
                    used[options.since[piece] + 1 : request] += pool.per_unit * options.piece[piece]
            fits = fits and bool((used <= pool.free + 1e-9).all())
        if fits:
            best = max(best, sum(int(options.depth[option]) for option in picked) * options.grain)
    return best


TURNS = st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 200))
LOADS = st.lists(st.lists(TURNS, min_size=1, max_size=3), min_size=1, max_size=3).filter(
    lambda load: sum(map(len, load)) <= 6
)


@settings(max_examples=150, deadline=None)
@given(load=LOADS, states=st.integers(1, 4), kv_blocks=st.integers(12, 40), shared=st.booleans())
def test_the_optimum_lies_between_the_bound_and_the_plan(
    load: list[list[tuple[list[int], int]]], states: int, kv_blocks: int, shared: bool
) -> None:
    sessions = [session(str(i), turns, head=(128, 0)) for i, turns in enumerate(load)]
    steps = steps_of(*sessions, concurrent=2)
    budget = Budget(states, kv_tokens=kv_blocks * 64, state_bytes=300, kv_token_bytes=1)
    options = find_options(steps, 64)
    pools = one_pool(budget, options) if shared else split_pools(budget, options)
    bound = clairvoyant_bound(options, pools, iterations=100)
    least = sum(step.prompt_tokens for step in steps) - most_saved(options, pools)
    assert bound.computed_tokens <= least + 1e-6
    assert least <= bound.plan_tokens + 1e-6


def bound_of(steps: list[Step], budget: Budget) -> Bound:
    """Bound with divided pools."""
    options = find_options(steps, 64)
    return clairvoyant_bound(options, split_pools(budget, options))


def test_each_slot_beside_the_running_one_holds_one_session() -> None:
    two = steps_of(session("a", growing(3)), session("b", growing(3)), concurrent=2)
    total = sum(step.prompt_tokens for step in two)
    saved_each = (20 + 4) * 64 + (30 + 4) * 64
    nothing = bound_of(two, Budget(1, 100_000, 1, 1))
    assert nothing.computed_tokens == nothing.plan_tokens == total
    # While one of two sessions runs, only the other's state is held.
    assert bound_of(two, Budget(2, 100_000, 1, 1)).computed_tokens == total - 2 * saved_each


def test_three_sessions_in_turn_share_one_slot_in_the_best_way() -> None:
    steps = steps_of(*(session(name, growing(3)) for name in "abc"), concurrent=3)
    total = sum(step.prompt_tokens for step in steps)
    # Holding a state takes the slot during two requests; best is one of the short turns and two of the long ones.
    best = total - (24 + 34 + 34) * 64
    bound = bound_of(steps, Budget(2, 100_000, 1, 1))
    assert best - 64 <= bound.computed_tokens <= best
    assert bound.plan_tokens == best


def test_unlimited_memory_needs_every_token_once() -> None:
    steps = steps_of(session("a", growing(3, output=1)))
    options = find_options(steps, 64)
    bound = clairvoyant_bound(options, split_pools(Budget(100, 100_000, 1, 1), options))
    assert bound.unlimited_tokens == bound.computed_tokens == 40 * 64


def test_kv_of_another_session_is_charged() -> None:
    steps = steps_of(session("a", growing(2, output=1)), session("b", growing(2, output=1)), concurrent=2)
    # While one session's 20 blocks run, the other's 20 fit beside them; during a path of 30 only half of 20 do.
    bound = bound_of(steps, Budget(100, 40 * 64, 1, 1))
    total = sum(step.prompt_tokens for step in steps)
    assert bound.plan_tokens == total - 20 * 64
    # Prices may hold half a prefix, which is why this is a bound.
    assert bound.computed_tokens == pytest.approx(total - 30 * 64, abs=64)
