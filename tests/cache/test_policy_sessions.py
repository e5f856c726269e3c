"""Which checkpoints go first when sessions work, wait, leave a branch, are released, pinned or locked."""

from __future__ import annotations

import math

import pytest

from k3_sglang.cache.chances import EvictionSettings
from k3_sglang.cache.naming import declare_named
from k3_sglang.cache.policy import CheckpointIndex
from tests.cache.chains import chain

SETTINGS = EvictionSettings()


def test_superseded_chunk_states_of_a_long_prefill_go_before_the_tips_of_other_sessions() -> None:
    index = CheckpointIndex()
    tips = [chain(index, 10 * i, [1_000, 21_000])[-1] for i in range(1, 4)]
    for _ in range(8):
        index.begin_request()
    prefill = chain(index, 100, [16_384 * i for i in range(1, 10)])
    gone = []
    for _ in range(len(prefill) - 2):
        victim = index.victim()
        assert victim is not None
        gone.append(victim.key)
        index.remove(victim.key)
    assert all(tip.key in index for tip in tips)
    assert all(key >= 100 or key % 10 == 0 for key in gone)


def test_a_session_idle_for_long_loses_to_a_working_one_though_its_history_is_longer() -> None:
    index = CheckpointIndex()
    idle = chain(index, 0, [150_000])[0]
    for _ in range(int(150 * SETTINGS.pauses * index.pause)):
        index.begin_request()
    working = chain(index, 10, [2_000])[0]
    assert index.victim() is idle
    assert working.key in index


def test_a_shared_head_outlives_a_single_history_of_the_same_length_and_age() -> None:
    index = CheckpointIndex()
    head = index.add(0, 10_000, None)
    for i in range(3):
        index.set_locked(index.add(1 + i, 11_000, head.key).key, True)
    alone = chain(index, 20, [10_000, 10_500, 11_000])
    index.set_locked(alone[1].key, True)
    index.set_locked(alone[2].key, True)
    assert index.victim() is alone[0]


def test_locked_and_pinned_checkpoints_are_no_victims_until_they_are_free_again() -> None:
    index = CheckpointIndex()
    made = chain(index, 0, [10, 20, 30, 40])
    index.begin_request(100.0)
    index.set_locked(0, True)
    assert index.pin(2, 150.0)
    assert not index.pin(3, 150.0), "one of four is the budget"
    assert made[3].declared
    spared = {1, 3}
    assert index.victim(spared) is None
    index.begin_request(151.0)
    victim = index.victim(spared)
    assert victim is made[2]
    index.set_locked(0, False)
    assert index.victim({1, 2, 3}) is made[0]


def test_release_reaches_only_what_one_session_used_alone() -> None:
    index = CheckpointIndex()
    (head,) = chain(index, 0, [10_000], session="a")
    tip = index.add(1, 12_000, head.key, session="a")
    index.use(head.key, "b")
    assert index.release("a") == 1
    assert (tip.released, head.released) == (True, False)
    assert index.victim() is tip
    index.use(tip.key, "a")
    assert not tip.released, "it came back after all"


def test_an_abandoned_branch_goes_before_working_sessions_and_comes_back_with_its_next_use() -> None:
    index = CheckpointIndex()
    chain(index, 1, [1000, 9000, 9800], session="left")
    chain(index, 11, [3000], session="working")
    assert index.demote("left", start=1000) == 2
    assert index.demote("left", start=1000) == 0, "it is left already"
    assert index.get(1).last_use == index.tick, "the head is before the branch"  # type: ignore[union-attr]
    before = index.score(index.get(3))  # type: ignore[arg-type]
    assert before < index.score(index.get(11))  # type: ignore[arg-type]
    index.use(3, "left")
    assert index.score(index.get(3)) == pytest.approx(before - math.log2(SETTINGS.left))  # type: ignore[arg-type]
    index.use(2, "other")
    index.use(2, "left")
    assert index.demote("left") == 1, "what two sessions used is not demoted, and 3 was left by going back to 2"
    assert [index.get(key).left for key in (1, 2, 3)] == [True, False, True]  # type: ignore[union-attr]


def test_when_pins_are_spent_those_that_their_own_path_left_behind_give_way() -> None:
    index = CheckpointIndex()
    turns = chain(index, 1, [100, 200, 300, 400, 500, 600, 700, 800])
    index.begin_request(1.0)
    assert index.pin(2, 100.0)
    assert index.pin(1, 100.0)
    assert not index.pin(3, 100.0), "it is superseded as well"
    assert index.pin(8, 100.0)
    assert [turn.pinned_until_s for turn in turns] == [100, 0, 0, 0, 0, 0, 0, 100], "the one worth less goes"
    assert index.pin(7, 100.0)
    assert [turn.pinned_until_s for turn in turns] == [0, 0, 0, 0, 0, 0, 100, 100]
    index.add(20, 650, 6)
    assert not index.pin(20, 100.0), "neither of the two is superseded"


def test_named_positions_on_a_path_are_declared_or_pinned_and_pins_are_renewed() -> None:
    index = CheckpointIndex()
    path = chain(index, 1, [100, 200, 300, 400])
    chain(index, 11, list(range(10, 90, 10)))
    index.begin_request(50.0)
    declare_named(index, 4, {100: 0.0, 250: 60.0, 300: 60.0, 390: 1.0, 1000: 5.0})
    assert [checkpoint.declared for checkpoint in path] == [True, False, False, False]
    assert [checkpoint.pinned_until_s for checkpoint in path] == [0, 0, 110.0, 0]
    index.begin_request(60.0)
    declare_named(index, 4, {300: 10.0})
    assert path[2].pinned_until_s == 110.0, "a shorter pin does not shorten the one that holds"
    declare_named(index, 3, {300: 60.0})
    assert path[2].pinned_until_s == 120.0
    index.unpin(3)
    index.unpin(3)
    assert path[2].pinned_until_s == 0
    declare_named(index, 2, {210: 0.0}, grid=16)
    assert path[1].declared


def test_an_announced_long_wait_counts_against_a_session_until_it_is_back() -> None:
    index = CheckpointIndex()
    (person,) = chain(index, 0, [6_000])
    (tool,) = chain(index, 10, [5_000])
    index.expect(person.key, 300.0)
    index.expect(tool.key, 15.0)
    assert index.victim() is person
    index.use(person.key)
    assert index.victim() is tool


def test_a_path_is_as_fresh_as_its_deepest_use() -> None:
    index = CheckpointIndex()
    old_head, _, _ = chain(index, 0, [10_000, 10_400, 11_000])
    idle_head, _, _ = chain(index, 10, [10_000, 10_400, 11_000])
    for _ in range(200):
        index.begin_request()
        index.use(2)
    for key in (1, 2, 11, 12):
        index.set_locked(key, True)
    assert (old_head.last_use, idle_head.last_use) == (200.0, 0.0)
    assert index.victim() is idle_head


def test_a_session_leaves_the_branch_it_does_not_go_on_with() -> None:
    index = CheckpointIndex()
    head, middle, tip = chain(index, 0, [10_000, 50_000, 90_000], session="a")
    rewritten = index.add(9, 12_000, head.key, session="a")
    assert [c.left for c in (head, middle, tip, rewritten)] == [False, True, True, False]
    index.use(tip.key, "a")
    assert [c.left for c in (head, tip, rewritten)] == [False, False, True], "it went back"


def test_a_session_leaves_nothing_that_others_use() -> None:
    index = CheckpointIndex()
    _, middle, tip = chain(index, 0, [10_000, 50_000, 90_000], session="a")
    index.use(middle.key, "b")
    index.add(9, 12_000, 0, session="a")
    assert (middle.left, tip.left) == (False, True)


def test_a_path_that_goes_another_way_leaves_what_is_below_even_without_a_session() -> None:
    index = CheckpointIndex()
    head, middle, tip = chain(index, 0, [10_000, 50_000, 90_000])
    index.use(head.key)
    assert [c.left for c in (head, middle, tip)] == [False, True, True]
    index.use(tip.key)
    assert [c.left for c in (head, middle, tip)] == [False, False, False], "both paths are alive"


def test_the_conversations_of_one_person_do_not_make_each_other_leave() -> None:
    index = CheckpointIndex()
    head, first = chain(index, 0, [10_000, 50_000], session="person")
    index.use(head.key, "person", moves=False)
    second = index.add(9, 12_000, head.key, session="person", moves=False)
    index.use(first.key, "person", moves=False)
    assert [c.left for c in (head, first, second)] == [False, False, False]
    assert index.release("person") == 3, "the name still counts"
