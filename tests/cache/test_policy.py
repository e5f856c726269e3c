"""The indexed victim choice equals a plain scan, and roles, gaps, locks, pins and releases do what they say."""

from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.cache.naming import declare_named
from k3_sglang.cache.policy import CheckpointIndex, EvictionSettings
from k3_sglang.cache.types import Checkpoint, Role

SETTINGS = EvictionSettings()
CHANCE = {Role.TIP: SETTINGS.tip, Role.PROMPT_END: SETTINGS.prompt_end, Role.SUPERSEDED: SETTINGS.superseded}


def chain(index: CheckpointIndex, first_key: int, depths: list[int], session: str | None = None) -> list[Checkpoint]:
    """Checkpoints of one path, each deeper than the one before."""
    made: list[Checkpoint] = []
    for i, depth in enumerate(depths):
        made.append(index.add(first_key + i, depth, made[-1].key if made else None, session=session))
    return made


def plain_score(index: CheckpointIndex, checkpoint: Checkpoint, interval: float) -> float:
    """The definition, written down again: log2(p * gap) minus a concave decay."""
    role = checkpoint.role
    if role is Role.FORK:
        chance = min(SETTINGS.fork_per_child * len(checkpoint.children), SETTINGS.fork_most)
    else:
        chance = CHANCE[role]
    if checkpoint.declared:
        chance = max(chance, SETTINGS.declared)
    if checkpoint.released:
        chance *= SETTINGS.released
    age = (index.tick - checkpoint.last_use) / interval
    young = SETTINGS.young_octaves * age
    old = SETTINGS.old_octaves * age + (SETTINGS.young_octaves - SETTINGS.old_octaves) * SETTINGS.knee
    return math.log2(chance * checkpoint.gap) - min(young, old)


def evictable(index: CheckpointIndex) -> list[Checkpoint]:
    return [c for c in index if not c.locked and c.pinned_until_s <= index.clock_s]


def change(index: CheckpointIndex, chooser: random.Random, next_key: int) -> None:
    """One random event: a checkpoint more or less, a use, a lock, a hint, time."""
    present = list(index)
    if not present or chooser.random() < 0.45:
        add_somewhere(index, chooser, present, next_key)
        return
    one = chooser.choice(present)

    def requests() -> None:
        for _ in range(chooser.randint(1, 30)):
            index.begin_request(index.clock_s + chooser.random())

    def evict() -> None:
        victim = index.victim()
        if victim is not None:
            index.remove(victim.key)

    events = [
        (27, lambda: index.observe_reuse(index.use(one.key, chooser.choice([None, "a", "b"])))),
        (27, requests),
        (13, lambda: index.set_locked(one.key, chooser.random() < 0.5)),
        (7, lambda: index.declare(one.key)),
        (4, lambda: index.pin(one.key, index.clock_s + 3)),
        (4, lambda: index.expect(one.key, chooser.random() * 50)),
        (4, lambda: index.release(chooser.choice(["a", "b"]))),
        (3, lambda: index.demote(chooser.choice(["a", "b"]), chooser.choice([0, one.depth]))),
        (3, lambda: index.unpin(one.key)),
        (14, evict),
    ]
    chooser.choices([event for _, event in events], [weight for weight, _ in events])[0]()


def add_somewhere(index: CheckpointIndex, chooser: random.Random, present: list[Checkpoint], key: int) -> None:
    """A new checkpoint at the end of a path, beside others, or between two."""
    parent = chooser.choice([None, *present])
    base = parent.depth if parent else 0
    below = [] if parent is None else [c for c in parent.children.values() if c.depth > base + 1]
    if below and chooser.random() < 0.4:
        below = chooser.sample(below, chooser.randint(1, len(below)))
        depth = chooser.randint(base + 1, min(c.depth for c in below) - 1)
    else:
        below, depth = [], base + chooser.randint(1, 40_000)
    index.add(key, depth, parent.key if parent else None, [c.key for c in below])


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 150))
def test_the_indexed_victim_is_the_one_a_scan_finds(seed: int, steps: int) -> None:
    chooser = random.Random(seed)
    index = CheckpointIndex()
    for next_key in range(steps):
        change(index, chooser, next_key)
        interval = index._reuse_in_queues  # the mean as of the last rebuild; it may lag by the allowed drift
        assert 1 / SETTINGS.reuse_drift <= index.reuse_interval / interval <= SETTINGS.reuse_drift
        candidates = evictable(index)
        victim = index.victim()
        assert (victim is None) == (not candidates)
        if victim is not None:
            assert victim in candidates
            scores = {c.key: plain_score(index, c, interval) for c in candidates}
            assert scores[victim.key] <= min(scores.values()) + 1e-6
    check_links(index)


def check_links(index: CheckpointIndex) -> None:
    for checkpoint in index:
        above = checkpoint.parent
        assert above is None or (above.key in index and above.children[checkpoint.key] is checkpoint)
        assert checkpoint.gap > 0
        assert all(child.parent is checkpoint for child in checkpoint.children.values())


def test_roles_follow_the_number_of_deeper_checkpoints() -> None:
    index = CheckpointIndex()
    head, middle, prompt_end, tip = chain(index, 0, [100, 200, 300, 350])
    assert [c.role for c in (head, middle, prompt_end, tip)] == [
        Role.SUPERSEDED,
        Role.SUPERSEDED,
        Role.PROMPT_END,
        Role.TIP,
    ]
    index.add(9, 150, head.key)
    assert head.role is Role.FORK
    index.remove(tip.key)
    assert (prompt_end.role, middle.role) == (Role.TIP, Role.PROMPT_END)


def test_a_removed_checkpoint_leaves_its_tokens_to_those_below() -> None:
    index = CheckpointIndex()
    first, second, third = chain(index, 0, [100, 250, 300])
    index.remove(second.key)
    assert third.parent is first
    assert third.gap == 200
    index.remove(first.key)
    assert third.gap == 300


def test_a_checkpoint_between_two_others_takes_over_the_ones_below_it() -> None:
    index = CheckpointIndex()
    first, deep = chain(index, 0, [100, 500])
    other = index.add(2, 700, first.key)
    between = index.add(3, 300, first.key, [deep.key])
    assert deep.parent is between
    assert deep.gap == 200
    assert set(first.children) == {other.key, between.key}


@pytest.mark.parametrize(("depth", "parent", "children"), [(100, 0, []), (50, 0, []), (600, 0, [1]), (0, None, [])])
def test_a_checkpoint_out_of_order_is_refused(depth: int, parent: int | None, children: list[int]) -> None:
    index = CheckpointIndex()
    chain(index, 0, [100, 500])
    with pytest.raises(ValueError, match="does not lie between"):
        index.add(7, depth, parent, children)
    with pytest.raises(ValueError, match="already there"):
        index.add(1, 900, None)
    assert len(index) == 2


def test_superseded_chunk_states_of_a_long_prefill_go_before_the_tips_of_other_sessions() -> None:
    index = CheckpointIndex()
    tips = [chain(index, 10 * i, [20_000, 21_000])[-1] for i in range(1, 4)]
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


def test_an_idle_session_loses_to_a_working_one_however_long_its_history() -> None:
    index = CheckpointIndex()
    idle = chain(index, 0, [150_000])[0]
    for _ in range(int(12 * SETTINGS.knee * index.reuse_interval)):
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
    assert index.demote("left", start=1000) == 0, "it is as old as it gets"
    assert index.get(1).last_use == index.tick, "the head is before the branch"  # type: ignore[union-attr]
    before = index.score(index.get(3))  # type: ignore[arg-type]
    assert before < index.score(index.get(11))  # type: ignore[arg-type]
    index.use(3, "left")
    assert index.score(index.get(3)) == before + SETTINGS.knee * SETTINGS.young_octaves  # type: ignore[arg-type]
    index.use(2, "other")
    index.use(2, "left")
    assert index.demote("left") == 2, "what two sessions used is not demoted"


def test_when_pins_are_spent_those_that_their_own_path_left_behind_give_way() -> None:
    index = CheckpointIndex()
    turns = chain(index, 1, [100, 200, 300, 400, 500, 600, 700, 800])
    index.begin_request(1.0)
    assert index.pin(2, 100.0)
    assert index.pin(1, 100.0)
    assert not index.pin(3, 100.0), "it is superseded as well"
    assert index.pin(8, 100.0)
    assert [turn.pinned_until_s for turn in turns] == [0, 100, 0, 0, 0, 0, 0, 100], "of equal ones the older goes"
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


def test_a_session_that_is_expected_late_keeps_its_place() -> None:
    index = CheckpointIndex(EvictionSettings(wait_credit=1.0))
    for second in range(1, 40):
        index.begin_request(float(second))
    (waiting,) = chain(index, 0, [5_000])
    (other,) = chain(index, 10, [6_000])
    index.expect(waiting.key, 40.0)
    for second in range(40, 80):
        index.begin_request(float(second))
    assert index.victim() is other


def test_a_flush_forgets_checkpoints_but_not_how_patient_the_sessions_are() -> None:
    index = CheckpointIndex()
    chain(index, 0, [10, 20])
    for _ in range(100):
        index.observe_reuse(90.0)
    patience = index.reuse_interval
    index.clear()
    assert len(index) == 0
    assert index.victim() is None
    assert index.reuse_interval == patience > 60
    chain(index, 0, [10, 20])
    assert index.victim() is not None


def test_settings_that_are_not_concave_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 0 < old <= young"):
        EvictionSettings(young_octaves=0.2, old_octaves=0.3)


def test_queues_stay_small_when_the_same_few_checkpoints_change_all_the_time() -> None:
    index = CheckpointIndex()
    chain(index, 0, list(range(10, 200, 10)))
    for i in range(20_000):
        index.use(i % 19)
    held = len(index._young.entries) + len(index._old.entries) + len(index._knees)
    assert held < 3 * (8 * 19 + 1024) + 60


def test_a_victim_among_ten_thousand_costs_no_scan() -> None:
    """Ten times the checkpoints must not cost ten times the time; a scan would."""

    def seconds_per_eviction(count: int) -> float:
        chooser = random.Random(1)
        index = CheckpointIndex()
        keys: list[int] = []
        for key in range(count):
            parent = chooser.choice(keys) if keys and chooser.random() < 0.7 else None
            depth = (index.get(parent).depth if parent is not None else 0) + chooser.randint(1, 5000)  # type: ignore[union-attr]
            index.add(key, depth, parent)
            keys.append(key)
            index.begin_request()
        best = math.inf
        for _ in range(5):
            started = time.process_time()
            for _ in range(100):
                victim = index.victim()
                assert victim is not None
                index.remove(victim.key)
            best = min(best, (time.process_time() - started) / 100)
        return best

    assert seconds_per_eviction(10_000) < 5 * seconds_per_eviction(1_000) + 1e-5
