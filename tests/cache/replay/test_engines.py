"""Each model against loads small enough to work out by hand, and against rules every cache obeys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.cache.replay.bound import clairvoyant_bound, find_options, one_pool, split_pools
from k3_sglang.cache.replay.budget import Budget
from k3_sglang.cache.replay.driver import BudgetError
from k3_sglang.cache.replay.engines import Marconi, TokenSpeed, VllmAlign, VllmAll, tuned_marconi
from k3_sglang.cache.replay.models import ModelCache, replay_model
from k3_sglang.cache.replay.schedule import Step
from tests.cache.replay.sessions import growing, session, steps_of

AMPLE = Budget(states=100, kv_tokens=1_000_000, state_bytes=100_000, kv_token_bytes=10)


def tokens(start: int, end: int) -> float:
    """A cost per span for Marconi: one FLOP per token."""
    return float(end - start)


def marconi(budget: Budget, *, divided: bool = False) -> Marconi:
    """Marconi with equal weights."""
    return Marconi(budget, tokens, alpha=1.0, divided=divided)


MAKERS: dict[str, Callable[..., ModelCache]] = {
    "vllm-align": VllmAlign,
    "vllm-all": VllmAll,
    "tokenspeed": TokenSpeed,
    "marconi": marconi,
}
ALL_MODELS = pytest.mark.parametrize("name", MAKERS)


def hits(model: ModelCache, steps: list[Step], *, serial: bool = True) -> list[int]:
    """Hit tokens of each step."""
    return [one.hit_tokens for one in replay_model(model, steps, serial=serial)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Prompts of 1344, 1984 and 2624 tokens; 319 of 320 answer tokens have KV and come back in the next prompt.
        ("vllm-align", [0, 1280, 1920]),  # prompt ends, floored to 128; nothing of the answer
        ("vllm-all", [0, 1536, 1536]),  # multiples of 1536 only
        ("tokenspeed", [0, 1536, 2176]),  # end of the answer, floored to 128
        ("marconi", [0, 1600, 2240]),  # last decoded token, as far as 64-token blocks can tell
    ],
)
def test_a_growing_session_hits_where_the_model_keeps_states(name: str, expected: list[int]) -> None:
    assert hits(MAKERS[name](AMPLE), steps_of(session("one", growing(3, start=21)))) == expected


@pytest.mark.parametrize(("name", "expected"), [("vllm-align", 1536), ("tokenspeed", 1664), ("marconi", 1664)])
def test_a_shared_head_is_hit_from_the_third_session_on(name: str, expected: int) -> None:
    own = [session(str(i), [([*range(26), 100 + i, *range(200, 210)], 64)], head=(26 * 64, 0)) for i in range(3)]
    assert hits(MAKERS[name](AMPLE), steps_of(*own)) == [0, 0, expected]


def test_least_recently_used_states_go_first() -> None:
    sessions = [session(name, growing(2, start=20)) for name in "abc"]
    tight = Budget(states=3, kv_tokens=1_000_000, state_bytes=100_000, kv_token_bytes=10)
    steps = steps_of(*sessions, concurrent=3)
    assert [step.session for step in steps[:3]] == [step.session for step in steps[3:]]
    # One slot belongs to the running request; the third session's state takes the first one's place, and so on round.
    assert hits(VllmAlign(tight, divided=True), steps) == [0] * 6
    assert hits(VllmAlign(AMPLE, divided=True), steps) == [0, 0, 0, 1280, 1280, 1280]


def test_tokenspeed_gives_up_unproven_shallow_chunks_first() -> None:
    budget = Budget(states=4, kv_tokens=100_000, state_bytes=100_000, kv_token_bytes=10, chunk=256)
    model = TokenSpeed(budget, divided=True)
    replay_model(model, steps_of(session("one", [(range(20), 1)])), serial=True)
    assert {node.depth: node.kind for node in model.tree.nodes() if node.state} == {
        12: "chunk",
        16: "chunk",
        20: "endpoint",
    }


def test_tokenspeed_keeps_a_chunk_that_was_resumed_from() -> None:
    budget = Budget(states=4, kv_tokens=100_000, state_bytes=100_000, kv_token_bytes=10, chunk=256)
    model = TokenSpeed(budget, divided=True)
    edited = session("one", [(range(20), 1), ([*range(17), *range(40, 43)], 1)])
    assert hits(model, steps_of(edited)) == [0, 16 * 64]
    assert {node.depth: node.kind for node in model.tree.nodes() if node.state}[16] == "acquired"


def test_marconi_prefers_what_saves_more_per_byte() -> None:
    sessions = [session(str(size), [(range(1000 * size, 1001 * size), 1)]) for size in (10, 100, 200)]
    budget = Budget(states=3, kv_tokens=100_000, state_bytes=100_000, kv_token_bytes=10)
    model = Marconi(budget, tokens, alpha=100.0, divided=True)
    steps = steps_of(*sessions)
    replay_model(model, steps, serial=True)
    first, second, third = (step.prompt_tokens // 64 for step in steps)
    assert {node.depth for node in model.tree.nodes() if node.state} == {max(first, second), third}


def test_marconi_chooses_the_weight_that_computes_least() -> None:
    steps = steps_of(session("one", growing(4)))
    model = tuned_marconi(AMPLE, tokens, steps, serial=True, alphas=(0.5, 1.0))
    assert model.alpha == 0.5
    assert model.tree.num_states == 0, "the load must begin on an empty cache"


def test_a_request_larger_than_the_memory_is_an_error() -> None:
    tiny = Budget(states=2, kv_tokens=640, state_bytes=10, kv_token_bytes=10)
    with pytest.raises(BudgetError, match="a request of 12800 tokens does not fit"):
        replay_model(VllmAlign(tiny), steps_of(session("one", [(range(200), 1)])), serial=True)


TURNS = st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 400))
LOADS = st.lists(st.lists(TURNS, min_size=1, max_size=4), min_size=1, max_size=4)


@ALL_MODELS
@settings(max_examples=60, deadline=None)
@given(load=LOADS, states=st.integers(2, 8), divided=st.booleans(), serial=st.booleans())
def test_nothing_is_lost_and_nobody_beats_the_bound(
    name: str, load: list[list[tuple[list[int], int]]], states: int, divided: bool, serial: bool
) -> None:
    sessions = [session(str(i), turns, head=(64, 0)) for i, turns in enumerate(load)]
    steps = steps_of(*sessions, concurrent=2, serial=serial)
    budget = Budget(states, kv_tokens=4000, state_bytes=2000, kv_token_bytes=1)
    model = MAKERS[name](budget, divided=divided)
    served = replay_model(model, steps, serial=serial)
    assert all(0 <= one.hit_tokens <= one.kv_hit_tokens <= one.prompt_tokens for one in served)
    assert all(one.hit_tokens + one.computed_tokens == one.prompt_tokens for one in served)
    nodes = list(model.tree.nodes())
    assert model.tree.kv_units == sum(node.units for node in nodes)
    assert model.tree.num_states == sum(node.state for node in nodes)
    assert not model.running and all(node.pins == 0 for node in nodes)
    options = find_options(steps, budget.grain)
    pools = split_pools(budget, options) if divided else one_pool(budget, options)
    bound = clairvoyant_bound(options, pools, iterations=60)
    assert bound.unlimited_tokens <= bound.computed_tokens <= sum(one.computed_tokens for one in served) + 1e-6
