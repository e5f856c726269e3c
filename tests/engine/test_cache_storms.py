"""The checkpoint cache under fire, in every mode: many sessions in small pools, aborts, retraction, flushes under load.

What field reports of other engines tell is here under their numbers; those about single operations are in
``tests/cache/test_reports.py``.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.engine.k3_cache import STATE_SLOTS, Mode, cold
from tests.engine.stack import Engine, Stack
from tests.engine.test_prefix_cache import prompt

COMPARISONS = 20
"""Per mode; ``benchmarks/cache_exactness.py`` makes hundreds."""


def sessions(seed: int, count: int, turns: int) -> list[list[int]]:
    """Prompts of sessions that share a head, fork from each other and grow; each extends an earlier one or its part."""
    chooser = random.Random(seed)
    head = prompt(150, seed=seed)
    made = [head + prompt(chooser.randrange(20, 300), seed=500 + seed + i) for i in range(count)]
    for turn in range(turns):
        base = chooser.choice(made)
        cut = chooser.choice([len(base), len(base), chooser.randrange(100, len(base))])
        made.append(base[:cut] + prompt(chooser.randrange(1, 120), seed=8000 + 100 * seed + turn))
    return made


def test_many_sessions_under_small_pools_give_the_tokens_of_cold_runs(k3: Engine) -> None:
    """Six at a time, in pools that hold a third of them; every answer is compared."""
    prompts = sessions(seed=4, count=6, turns=8)
    alone = [cold(k3, ids, 10) for ids in prompts]
    k3.flush()
    order = random.Random(4).choices(range(len(prompts)), k=COMPARISONS)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda i: k3.generate(prompts[i], 10), order))
    assert [answer.ids for answer in answers] == [alone[i] for i in order]
    assert sum(answer.cached_tokens for answer in answers) > 0


def test_b34_a_checkpoint_is_written_whole_and_forks_leave_its_bytes_alone(k3: Engine, mode: Mode) -> None:
    """A slot that was never written, or an overwritten one, made answers wrong on warm runs: state and window."""
    ids = prompt(320, seed=34)
    first = k3.generate(ids, 32)
    assert k3.generate(ids, 32).ids == first.ids
    (before,) = k3.cache("states")
    tails = [prompt(length, seed=340 + length) for length in (1, 2, 3, 70)]  # the convolution sees three tokens back
    warm_at = [k3.generate(ids + list(first.ids[:-1]) + tail, 8) for tail in tails]
    with ThreadPoolExecutor(2) as pool:
        forks = list(pool.map(lambda i: k3.generate(ids + prompt(30, seed=i), 16), (1, 2)))
    (after,) = k3.cache("states")
    assert before["states"].items() <= after["states"].items()
    assert all(answer.cached_tokens >= mode.floor(320) for answer in (*warm_at, *forks))
    for tail, answer in zip(tails, warm_at, strict=True):
        assert answer.ids == cold(k3, ids + list(first.ids[:-1]) + tail, 8)
    assert [answer.ids for answer in forks] == [cold(k3, ids + prompt(30, seed=i), 16) for i in (1, 2)]


def generate_or_leave(engine: Engine, ids: Sequence[int], new_tokens: int, leave_after_s: float | None) -> object:
    """The answer's ids; None for a client that hung up before it came."""
    body = {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }
    try:
        response = engine.http.post("/generate", json=body, timeout=leave_after_s or 120)
    except httpx.TimeoutException:
        return None
    assert response.status_code == httpx.codes.OK, response.text
    return tuple(response.json()["output_ids"])


def test_b37_interleaved_conversations_under_eviction_and_aborts_never_see_each_other(k3: Engine, mode: Mode) -> None:
    """Half of the clients hang up, in a prefill or while decoding; the others get what they get alone."""
    prompts = [prompt(900, seed=37)[: 100 * i] + prompt(400 + 90 * i, seed=370 + i) for i in range(8)]
    alone = [cold(k3, ids, 24) for ids in prompts]
    k3.flush()
    chooser = random.Random(37)
    jobs = [(i, chooser.choice([None, 0.05, 0.3, 1.0])) for i in [*range(8), *range(8), *range(8)]]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda job: generate_or_leave(k3, prompts[job[0]], 24, job[1]), jobs))
    k3.wait_idle()
    stayed = [(i, answer) for (i, _), answer in zip(jobs, answers, strict=True) if answer is not None]
    assert [answer for _, answer in stayed] == [alone[i] for i, _ in stayed]
    assert len(stayed) >= sum(leave is None for _, leave in jobs)
    later = [k3.generate(ids, 24).ids for ids in prompts]
    assert later == alone, "what the storm left in the cache is true"


def test_requests_retracted_because_the_pool_is_full_go_on_with_the_same_tokens(k3: Engine, k3_stack: Stack) -> None:
    """Four prompts fill most of the pool, their answers want more than the rest."""
    prompts = [prompt(1270 + 7 * i, seed=400 + i) for i in range(4)]
    new_tokens = 300
    sampling = {"ignore_eos": False, "min_new_tokens": new_tokens}
    alone = [k3.generate(ids, new_tokens, **sampling).ids for ids in prompts[:2]]
    k3.flush()
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = []
        for ids in prompts:
            begun = threading.Event()
            running.append(pool.submit(k3.stream, ids, new_tokens, begun, **sampling))
            assert begun.wait(120), "no first token came"
        together = [answer.result(120) for answer in running]
    k3_stack.wait_for_output("Retract requests")
    assert together[:2] == alone
    assert {len(ids) for ids in together} == {new_tokens}


def test_flushes_and_looks_from_outside_under_load_break_nothing(k3: Engine) -> None:
    ids = prompt(500, seed=55)
    alone = cold(k3, ids, 30)
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(k3.generate, ids[: 500 - 40 * (i % 3)], 30) for i in range(9)]
        refused = [k3.http.post("/flush_cache").status_code for _ in range(5)]
        for command in ("dump", "metrics", "check", "states"):
            assert k3.cache(command)
        whole = [answer.result(120).ids for answer in answers]
    assert whole[0] == whole[3] == whole[6] == alone
    assert set(refused) <= {httpx.codes.OK, httpx.codes.BAD_REQUEST}


def test_after_all_of_that_every_slot_is_free_or_cached_and_none_was_asserted(k3: Engine) -> None:
    """The engine compares index, tree and pools whenever it is idle (``K3_SGLANG_CACHE_CHECK``), and still runs."""
    k3.wait_idle()
    k3.flush()
    (tree,) = k3.cache("dump")
    assert (tree["nodes"], tree["slots"]) == ([], {"total": STATE_SLOTS, "free": STATE_SLOTS})
    (counted,) = k3.cache("metrics")
    assert counted["metrics"]["resynchronised"] == 0
    assert sum(counted["metrics"]["evicted"].values()) + counted["metrics"]["dropped_with_kv"] > 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_warm_answers_equal_cold_ones(k3: Engine, seed: int) -> None:
    """One after the other, so that every prompt finds all that the ones before it left."""
    prompts = sessions(seed, count=3, turns=COMPARISONS // 2)
    warm = [k3.generate(ids, 12) for ids in prompts]
    assert [answer.ids for answer in warm] == [cold(k3, ids, 12) for ids in prompts]
    assert sum(answer.cached_tokens > 0 for answer in warm) > len(prompts) // 2
