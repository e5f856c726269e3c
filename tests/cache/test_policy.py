"""The indexed victim choice equals a plain scan and stays cheap; roles, gaps and parents are what they say."""

from __future__ import annotations

import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.cache.chances import EvictionSettings
from k3_sglang.cache.policy import CheckpointIndex
from k3_sglang.cache.types import Checkpoint, Role
from tests.cache.chains import chain

SETTINGS = EvictionSettings()


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
