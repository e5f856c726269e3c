"""Many requests at once: none sees another's state, and aborted ones give everything back."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.engine.stack import Engine
from tests.engine.test_prefix_cache import prompt


def test_concurrent_sessions_equal_their_solo_runs(engine: Engine) -> None:
    shared = prompt(150, seed=3)
    prompts = [shared + prompt(20 + 17 * i, seed=100 + i) for i in range(6)]
    prompts += [prompt(30 + 41 * i, seed=200 + i) for i in range(6)]
    solo = []
    for ids in prompts:
        engine.flush()
        solo.append(engine.generate(ids, 40).ids)
    engine.flush()
    order = list(range(len(prompts))) * 2
    random.Random(0).shuffle(order)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda i: engine.generate(prompts[i], 40).ids, order))
    assert answers == [solo[i] for i in order]


def test_aborted_streams_leave_both_pools_whole(engine: Engine) -> None:
    """Each round abandons a stream after one chunk; more rounds than the state pool has slots would expose a leak."""
    ids = prompt(200, seed=5)
    expected = engine.generate(ids, 16).ids
    for round_number in range(70):
        body = {
            "input_ids": ids + prompt(round_number % 5 + 1, seed=round_number),
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 500, "ignore_eos": True},
        }
        with engine.http.stream("POST", "/generate", json=body) as response:
            next(response.iter_lines())
    engine.wait_idle()
    engine.flush()
    assert engine.generate(ids, 16).ids == expected


def test_a_request_aborted_by_id_ends_with_that_reason(engine: Engine) -> None:
    body = {
        "input_ids": prompt(50, seed=8),
        "rid": "abort-me",
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True},
    }
    reasons = []
    with engine.http.stream("POST", "/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert engine.http.post("/abort_request", json={"rid": "abort-me"}).status_code == httpx.codes.OK
        reasons = [line for line in lines if '"abort"' in line]
    assert reasons
    engine.wait_idle()
    engine.flush()


def test_more_requests_than_the_engine_runs_at_once_all_finish(engine: Engine) -> None:
    prompts = [prompt(64 + i, seed=300 + i) for i in range(24)]
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda ids: engine.generate(ids, 20), prompts))
    assert all(len(answer.ids) == 20 for answer in answers)
