"""The indexed victim choice equals a plain scan, and roles, gaps, locks, pins and releases do what they say."""

from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.cache.chances import EvictionSettings
from k3_sglang.cache.naming import declare_named
from k3_sglang.cache.policy import CheckpointIndex
from k3_sglang.cache.types import Checkpoint, Role

SETTINGS = EvictionSettings()


def chain(index: CheckpointIndex, first_key: int, depths: list[int], session: str | None = None) -> list[Checkpoint]:
    """Checkpoints of one path, each deeper than the one before."""
    made: list[Checkpoint] = []
    for i, depth in enumerate(depths):
        made.append(index.add(first_key + i, depth, made[-1].key if made else None, session=session))
    return made


def plain_chance(checkpoint: Checkpoint) -> float:
    """The definition, written down again: chance by role, and what the caller said."""
    children = list(checkpoint.children.values())
    if not children:
        chance = SETTINGS.tip
    elif len(children) > 1:
        chance = min(SETTINGS.fork_per_child * len(children), SETTINGS.fork_most)
    elif not children[0].children:
        chance = SETTINGS.prompt_end
    else:
        chance = SETTINGS.edit * math.log2(children[0].depth / checkpoint.depth)
        grandchildren = list(children[0].children.values())
        chance += SETTINGS.last_turn * (len(grandchildren) == 1 and not grandchildren[0].children)
    if checkpoint.declared:
        chance = max(chance, SETTINGS.declared)
    for said, factor in (
        (checkpoint.released, SETTINGS.released),
        (checkpoint.left, SETTINGS.left),
        (checkpoint.waits, SETTINGS.waits),
    ):
        chance *= factor if said else 1.0
    return chance


def plain_decay(age: float, pause: float) -> float:
    """log2(1 + age) in octaves, made straight between ages of 0, 1, 3, 7, ... pauses."""
    pauses, begins, octave = age / (pause * SETTINGS.pauses), 0.0, 0
    while pauses >= 2 * begins + 1:
        begins, octave = 2 * begins + 1, octave + 1
    return SETTINGS.octaves * (octave + (pauses - begins) / (begins + 1))


def plain_scores(index: CheckpointIndex, candidates: list[Checkpoint], pause: float, *, kv: bool) -> dict[int, float]:
    """Score of each; for KV only the tips', per token."""
    return {
        c.key: math.log2(plain_chance(c) * (1 if kv else c.gap)) - plain_decay(index.tick - c.last_use, pause)
        for c in candidates
        if not (kv and c.children)
    }


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
        pause = index._pause_in_heaps  # the median as of the last rebuild; it may lag by the allowed drift
        assert 1 / SETTINGS.pause_drift <= index.pause / pause <= SETTINGS.pause_drift
        candidates = evictable(index)
        for victim, kv in ((index.victim(), False), (index.kv_victim(), True)):
            scores = plain_scores(index, candidates, pause, kv=kv)
            assert (victim is None) == (not scores)
            if victim is not None:
                assert scores[victim.key] <= min(scores.values()) + 1e-6
                assert index.score(victim) == pytest.approx(plain_scores(index, [victim], pause, kv=False)[victim.key])
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


def test_a_hit_saves_what_lies_behind_the_next_shallower_checkpoint_at_that_time() -> None:
    index = CheckpointIndex()
    index.add(1, 100, None)
    deep = index.add(2, 250, 1)
    deep.count_hit()
    index.remove(1)
    deep.count_hit()
    assert (deep.hits, deep.saved_tokens) == (2, 150 + 250)


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


def test_kv_is_dropped_by_how_likely_a_tip_returns_not_by_its_length() -> None:
    index = CheckpointIndex()
    chain(index, 0, [500])
    for _ in range(100):
        index.begin_request()
    chain(index, 10, [200_000])
    chain(index, 20, [300], session="over")
    index.release("over")
    assert index.kv_victim() is index.get(20)
    index.remove(20)
    assert index.kv_victim() is index.get(0)


def test_a_flush_forgets_checkpoints_but_not_how_patient_the_sessions_are() -> None:
    index = CheckpointIndex()
    chain(index, 0, [10, 20])
    for _ in range(100):
        index.observe_reuse(90.0)
    patience = index.pause
    index.clear()
    assert len(index) == 0
    assert index.victim() is None
    assert index.pause == patience > 20
    chain(index, 0, [10, 20])
    assert index.victim() is not None


def test_queues_stay_small_when_the_same_few_checkpoints_change_all_the_time() -> None:
    index = CheckpointIndex()
    chain(index, 0, list(range(10, 200, 10)))
    for i in range(20_000):
        index.set_locked(i % 19, i % 38 < 19)
        index.begin_request()
    held = sum(len(heap) for order in (index._states, index._tips) for heap in order)
    assert held < 3 * (8 * 19 + 1024)


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
