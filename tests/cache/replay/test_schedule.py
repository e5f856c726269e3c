"""Sessions become one ordered load, and every step's path says which answers come back."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.cache.replay.schedule import Pacing, Step, make_steps
from k3_sglang.cache.replay.traces import Request, Session, Stream, Trace, read_trace
from tests.cache.replay.conftest import TraceWriter
from tests.cache.replay.sessions import encoded, growing, session, steps_of


def common(one: Step, other: Step, grain: int = 64) -> int:
    """Units both paths begin with."""
    pairs = zip(one.units(grain), other.units(grain), strict=False)
    count = 0
    for a, b in pairs:
        if a != b:
            break
        count += 1
    return count


def test_an_answer_that_the_next_prompt_contains_is_part_of_its_path() -> None:
    first, second = steps_of(session("one", [(range(20), 320), (range(30), 64)]))
    # 1280 prompt tokens and 319 of 320 answer tokens have KV.
    assert first.path_tokens == 1599
    assert common(first, second) == 1599 // 64


def test_an_answer_longer_than_the_growth_of_the_prompt_does_not_come_back() -> None:
    first, second = steps_of(session("one", [(range(20), 1000), (range(30), 64)]))
    assert common(first, second) == 20
    assert len(first.units(64)) == (1280 + 999) // 64


def test_an_edited_history_shares_what_was_kept() -> None:
    first, second = steps_of(session("one", [(range(20), 320), ([*range(15), *range(50, 70)], 64)]))
    assert common(first, second) == 15


def test_sessions_share_the_head_only_when_its_lengths_are_equal() -> None:
    same = [session(name, [(range(10), 64)], head=(128, 192)) for name in "ab"]
    other = session("c", [(range(10), 64)], head=(128, 193))
    steps = {step.session: step for step in steps_of(*same, other)}
    assert common(steps["a"], steps["b"]) == 5
    assert common(steps["a"], steps["c"]) == 0


def test_a_head_that_was_edited_is_no_longer_shared() -> None:
    edited = session("a", [(range(10), 64), ([0, 1, 99, 3, 4, *range(20, 30)], 64)], head=(320, 0))
    steps = steps_of(edited, session("b", [(range(10), 64)], head=(320, 0)))
    later = next(step for step in steps if step.session == "a" and step.prompt_tokens == 15 * 64)
    fresh = next(step for step in steps if step.session == "b")
    assert common(later, fresh) == 2


def test_the_partial_last_block_continues_into_the_next_prompt() -> None:
    blocks = np.arange(10, dtype=np.int32)
    requests = (
        Request(0.0, 3 * 64 + 10, 100, blocks[:3], 0, 1.0),
        Request(10.0, 10 * 64, 5, blocks, 3, 1.0),
    )
    trace = Trace("sessions", (Session("one", (Stream("one", 0, (0, 0), requests),)),), shared_ids=False)
    first, second = make_steps(trace, Pacing(1))
    assert common(first, second, grain=1) == first.path_tokens == 3 * 64 + 10 + 99


def test_an_answer_that_ends_in_the_next_prompts_partial_block_comes_back_whole(write_trace: TraceWriter) -> None:
    line = encoded("one", [range(4), range(10)], [44, 50], outputs=[390, 20])
    first, second = make_steps(read_trace(write_trace([line])), Pacing(1))
    assert first.path_tokens == 300 + 389 and second.prompt_tokens == 690
    assert common(first, second, grain=1) == 689


@settings(max_examples=50, deadline=None)
@given(
    turns=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    concurrent=st.integers(1, 4),
    seed=st.integers(0, 5),
)
def test_no_more_sessions_are_open_than_allowed_and_streams_keep_their_order(
    turns: list[int], concurrent: int, seed: int
) -> None:
    sessions = tuple(session(str(i), growing(count)) for i, count in enumerate(turns))
    trace = Trace("sessions", sessions, shared_ids=False)
    steps = make_steps(trace, Pacing(concurrent), seed=seed)
    assert [step.index for step in steps] == list(range(sum(turns)))
    assert [step.start for step in steps] == sorted(step.start for step in steps)
    spans = {one.name: [step for step in steps if step.session == one.name] for one in sessions}
    for name, count in zip(spans, turns, strict=True):
        own = spans[name]
        assert [step.prompt_tokens for step in own] == sorted(step.prompt_tokens for step in own)
        assert len(own) == count and own[-1].last_of_session
        assert all(before.end <= after.start for before, after in zip(own, own[1:], strict=False))
    for now in {step.start for step in steps}:
        assert sum(own[0].start <= now < own[-1].end for own in spans.values()) <= concurrent
    again = make_steps(trace, Pacing(concurrent), seed=seed)
    assert [(step.session, step.start) for step in steps] == [(step.session, step.start) for step in again]


def test_long_pauses_are_cut() -> None:
    slow = session("one", growing(2), every_s=10_000.0)
    first, second = make_steps(Trace("sessions", (slow,), shared_ids=False), Pacing(1, max_gap_s=100.0))
    assert second.start - first.start == 100.0


def test_a_longer_request_of_an_open_load_continues_an_earlier_one(write_trace: TraceWriter) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1000, "output_length": 100, "hash_ids": [1, 2]},
        {"timestamp": 10, "input_length": 1100, "output_length": 100, "hash_ids": [5, 6, 7]},
        {"timestamp": 900, "input_length": 1600, "output_length": 100, "hash_ids": [1, 3, 4, 9]},
    ]
    trace = read_trace(write_trace(lines))
    first, other, later = make_steps(trace, Pacing())
    assert common(first, later) == first.path_tokens // 64
    assert common(first, other) == 0
