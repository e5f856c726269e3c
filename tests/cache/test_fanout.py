"""Requests with a common beginning: one leads, the others wait for it and for nothing else."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from k3_sglang.cache.fanout import FanOut, common_len

HEAD = list(range(1000))


def tokens(*parts: list[int]) -> array[int]:
    return array("q", [token for part in parts for token in part])


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_the_common_length_is_the_one_a_loop_counts(first: list[int], second: list[int]) -> None:
    expected = 0
    while expected < min(len(first), len(second)) and first[expected] == second[expected]:
        expected += 1
    assert common_len(array("q", first), array("q", second)) == expected


def test_the_first_leads_and_the_others_wait_until_its_checkpoint_is_there() -> None:
    fan_out = FanOut(least_tokens=256, most_rounds=10)
    leader, *others = (fan_out.enter(i, tokens(HEAD, [5000 + i] * 50)) for i in range(4))
    assert leader.cuts == {1000}
    assert not fan_out.must_wait(leader, 0)
    assert all(fan_out.must_wait(other, 0) for other in others)
    leader.computed = 999
    assert fan_out.must_wait(others[0], 0)
    leader.computed = 1000
    assert not any(fan_out.must_wait(other, 0) for other in others)


def test_nobody_waits_for_what_it_can_reuse_already() -> None:
    fan_out = FanOut(256, 10)
    fan_out.enter(0, tokens(HEAD, [1]))
    other = fan_out.enter(1, tokens(HEAD, [2]))
    assert fan_out.must_wait(other, 999)
    assert not fan_out.must_wait(other, 1000)


def test_on_a_grid_a_checkpoint_somewhat_before_the_common_end_is_enough() -> None:
    fan_out = FanOut(256, 10, grid=64)
    leader = fan_out.enter(0, tokens(HEAD, [1]))
    other = fan_out.enter(1, tokens(HEAD, [2]))
    leader.computed = 960
    assert not fan_out.must_wait(other, 0)
    leader.computed = 936
    assert fan_out.must_wait(other, 0)


def test_short_common_beginnings_are_computed_by_everybody() -> None:
    fan_out = FanOut(256, 10)
    fan_out.enter(0, tokens(HEAD[:200], [1] * 100))
    assert fan_out.enter(1, tokens(HEAD[:200], [2] * 100)).leader is None
    assert fan_out.enter(2, tokens(HEAD[:100])).leader is None


def test_an_identical_prompt_waits_for_all_but_its_last_token() -> None:
    fan_out = FanOut(256, 10)
    leader = fan_out.enter(0, tokens(HEAD))
    assert fan_out.enter(1, tokens(HEAD)).shared == 999
    assert leader.cuts == {999}


def test_a_leader_that_is_gone_or_a_wait_that_was_long_sets_the_others_free() -> None:
    fan_out = FanOut(256, most_rounds=3)
    fan_out.enter(0, tokens(HEAD, [1]))
    other = fan_out.enter(1, tokens(HEAD, [2]))
    other.rounds = 3
    assert not fan_out.must_wait(other, 0)
    other.rounds = 0
    assert fan_out.must_wait(other, 0)
    fan_out.present({1})
    assert not fan_out.must_wait(other, 0)
    fan_out.present(set())
    assert len(fan_out) == 0
    assert not fan_out._by_beginning


def test_what_the_leader_has_behind_it_is_not_waited_for() -> None:
    fan_out = FanOut(256, 10)
    leader = fan_out.enter(0, tokens(HEAD, [1] * 500))
    leader.computed = 1200
    assert fan_out.enter(1, tokens(HEAD, [2] * 500)).leader is None
