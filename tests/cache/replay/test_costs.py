"""Bytes, FLOPs and times of a replay, and hints that tell nothing a runtime could not know."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang import costs
from k3_sglang.cache.replay.budget import Budget, rank_bytes
from k3_sglang.cache.replay.driver import Served
from k3_sglang.cache.replay.flops import PromptCost, Speed, Times
from k3_sglang.cache.replay.hinting import PARAMETER, step_hints
from k3_sglang.cache.replay.release import RELEASE_TEXT
from tests.cache.replay.sessions import growing, session, steps_of

COST = PromptCost.of(RELEASE_TEXT)


def test_the_release_has_its_published_figures() -> None:
    assert (len(RELEASE_TEXT.kda_layers), len(RELEASE_TEXT.mla_layers)) == (69, 24)
    assert costs.total_parameters(RELEASE_TEXT) / 1e9 == pytest.approx(2779.48, abs=0.005)
    assert costs.active_parameters(RELEASE_TEXT) / 1e9 == pytest.approx(104.19, abs=0.005)


def test_tensor_parallelism_shards_states_and_not_the_latent() -> None:
    sharded = rank_bytes(RELEASE_TEXT, tp=8, state_dtype_bytes=4, kv_dtype_bytes=2, attention_dp=False)
    whole = rank_bytes(RELEASE_TEXT, tp=8, state_dtype_bytes=4, kv_dtype_bytes=1, attention_dp=True)
    assert sharded == (56_171_520, 27_648)
    assert whole == (449_372_160, 13_824)


def test_both_pools_make_the_total() -> None:
    budget = Budget(states=3, kv_tokens=1000, state_bytes=50, kv_token_bytes=2)
    assert budget.total_bytes == 2150
    assert budget.with_states(4).total_bytes == 2200
    assert (budget.units(16384), budget.units(10)) == (256, 1)


@settings(deadline=None)
@given(start=st.integers(0, 200), length=st.integers(0, 50))
def test_a_span_costs_what_its_tokens_cost_one_by_one(start: int, length: int) -> None:
    each = sum(costs.flops_per_token(RELEASE_TEXT, position) for position in range(start + 1, start + length + 1))
    assert COST.span(start, start + length) == pytest.approx(each, rel=1e-12)


def test_the_first_token_waits_for_flops_and_for_passes() -> None:
    speed = Speed(flops_per_s=1e15, chunk_overhead_s=0.5)
    served = Served(prompt_tokens=1000, hit_tokens=900, kv_hit_tokens=950, chunks=2)
    assert served.computed_tokens == 100
    assert COST.first_token_s(served, speed) == pytest.approx(COST.span(900, 1000) / 1e15 + 1.0)


def test_quantiles_are_by_nearest_rank() -> None:
    assert Times.of([3.0, 1.0, 2.0, 4.0]) == Times(mean=2.5, p50=3.0, p95=4.0)


def test_hints_name_session_head_and_end_but_not_the_future() -> None:
    first, second = steps_of(session("one", growing(2), head=(128, 70), every_s=1000.0))
    hints = [step_hints(step, 64)[PARAMETER] for step in (first, second)]
    assert [hint["session"] for hint in hints] == ["one", "one"]
    assert [hint["release"] for hint in hints] == [False, True]
    assert hints[0]["head_len"] == 3
    assert hints[0]["wait_s"] == hints[1]["wait_s"]
    (silent,) = steps_of(session("none", [(range(4), 10)]))
    assert step_hints(silent, 64) == {}
