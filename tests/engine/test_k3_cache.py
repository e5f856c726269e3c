"""The checkpoint cache in the real engine, small pools: exact ends, forks, heads, tokens equal to cold runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.engine.conftest import two_free_ports
from tests.engine.stack import Engine, Stack, running
from tests.engine.test_prefix_cache import prompt

KV_TOKENS = 6144
STATE_SLOTS = 18
CONFIGURATION = f"""
model: tiny
device: cpu
cache: k3
kv_tokens: {KV_TOKENS}
state_slots: {STATE_SLOTS}
max_running_requests: 4
page_size: 1
chunked_prefill_tokens: 1024
log_level: warning
"""
SHARED = 700
"""Tokens of a common head."""


@pytest.fixture(scope="module")
def k3_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    file: Path = tmp_path_factory.mktemp("k3") / "k3.yaml"
    file.write_text(CONFIGURATION, encoding="utf-8")
    with running(["--config", str(file)], *two_free_ports()) as started:
        yield started


@pytest.fixture
def k3(k3_stack: Stack) -> Iterator[Engine]:
    """The engine with our cache, empty."""
    client = Engine(k3_stack.engine_url)
    with client.http:
        client.flush()
        yield client
        client.wait_idle()


def cold(engine: Engine, ids: list[int], new_tokens: int) -> tuple[int, ...]:
    """What a request gives when nothing is cached."""
    engine.flush()
    answer = engine.generate(ids, new_tokens)
    assert answer.cached_tokens == 0
    return answer.ids


def test_the_engine_says_that_our_cache_is_the_one_in_use(k3: Engine) -> None:
    server = k3.http.get("/server_info").json()
    assert server["radix_cache_backend"] == "k3"
    assert server["mamba_radix_cache_strategy"] == "no_buffer"


def test_counters_and_the_tree_can_be_read_from_outside(k3: Engine) -> None:
    (before,) = k3.cache("metrics")
    ids = prompt(80, seed=44)
    k3.generate(ids, 5)
    (after,) = k3.cache("metrics")
    assert after["metrics"]["prompt_tokens"] - before["metrics"]["prompt_tokens"] == len(ids)
    (tree,) = k3.cache("dump")
    ends = {node["end"]: node["checkpoint"]["role"] for node in tree["nodes"] if node["checkpoint"]}
    assert ends == {len(ids): "prompt_end", len(ids) + 4: "tip"}
    (checked,) = k3.cache("check")
    assert (checked["problems"], checked["checkpoints"]) == ([], 2)
    assert k3.http.get("/k3/cache/dump?nodes=3").status_code == httpx.codes.BAD_REQUEST


@pytest.mark.parametrize(("prompt_len", "new_tokens"), [(1, 2), (37, 1), (100, 50), (64, 64), (1500, 7)])
def test_the_next_turn_computes_only_what_is_new(k3: Engine, prompt_len: int, new_tokens: int) -> None:
    ids = prompt(prompt_len, seed=prompt_len)
    answer = k3.generate(ids, new_tokens)
    longer = ids + list(answer.ids) + prompt(11, seed=3)
    warm = k3.generate(longer, 16)
    # The last token of an answer is sampled, never computed.
    assert warm.cached_tokens == prompt_len + new_tokens - 1
    assert warm.ids == cold(k3, longer, 16)


def test_a_path_that_leaves_in_the_middle_is_kept_at_exactly_that_token_the_first_time(k3: Engine) -> None:
    head = prompt(SHARED, seed=5)
    first, second, third = (head + prompt(90 + i, seed=60 + i) for i in range(3))
    k3.generate(first, 4)
    assert k3.generate(second, 4).cached_tokens == 0
    warm = k3.generate(third, 24)
    assert warm.cached_tokens == SHARED
    further = k3.generate(second + prompt(9, seed=4), 4)
    assert further.cached_tokens == len(second), "the end of the prompt is kept besides the fork"
    assert warm.ids == cold(k3, third, 24)


def test_a_head_that_the_caller_names_is_shared_from_the_second_session_on(k3: Engine) -> None:
    head = prompt(SHARED, seed=8)
    hints = {"k3_cache": {"head_len": SHARED, "session": "a"}}
    k3.generate(head + prompt(300, seed=1), 4, custom_params=hints)
    assert k3.generate(head + prompt(200, seed=2), 4).cached_tokens == SHARED


def test_unreadable_hints_change_nothing(k3: Engine) -> None:
    ids = prompt(120, seed=9)
    good = k3.generate(ids, 8)
    k3.flush()
    bad = k3.generate(ids, 8, custom_params={"k3_cache": {"head_len": "far"}})
    assert bad.ids == good.ids


def test_an_identical_prompt_is_computed_but_for_its_last_token(k3: Engine) -> None:
    ids = prompt(1400, seed=12)
    first = k3.generate(ids, 8)
    k3.generate(ids, 8)
    third = k3.generate(ids, 8)
    assert third.cached_tokens == len(ids) - 1
    assert third.ids == first.ids


def test_requests_that_arrive_together_compute_their_common_head_once(k3: Engine) -> None:
    head = prompt(1800, seed=21)
    children = [head + prompt(30 + i, seed=100 + i) for i in range(6)]
    with ThreadPoolExecutor(len(children)) as pool:
        answers = list(pool.map(lambda ids: k3.generate(ids, 6), children))
    assert sorted(answer.cached_tokens for answer in answers) == [0] + [len(head)] * 5
    assert answers[3].ids == cold(k3, children[3], 6)


def test_many_sessions_under_small_pools_give_the_tokens_of_cold_runs(k3: Engine) -> None:
    """Eight sessions with forks and a shared head, four at a time, in pools that hold a third of them."""
    chooser = random.Random(4)
    head = prompt(150, seed=77)
    prompts = [head + prompt(chooser.randrange(20, 400), seed=500 + i) for i in range(8)]
    prompts += [ids[: chooser.randrange(100, len(ids))] + prompt(40, seed=800 + i) for i, ids in enumerate(prompts)]
    alone = [cold(k3, ids, 12) for ids in prompts]
    k3.flush()
    order = [chooser.randrange(len(prompts)) for _ in range(60)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda i: k3.generate(prompts[i], 12), order))
    assert [answer.ids for answer in answers] == [alone[i] for i in order]
    assert sum(answer.cached_tokens for answer in answers) > 0


def test_an_aborted_prefill_and_an_aborted_answer_leave_the_pools_whole(k3: Engine) -> None:
    ids = prompt(2000, seed=31)
    with pytest.raises(Exception, match="timed out"):
        k3.http.post(
            "/generate",
            json={"input_ids": ids, "rid": "gone", "sampling_params": {"max_new_tokens": 3000, "temperature": 0}},
            timeout=1.5,
        )
    k3.http.post("/abort_request", json={"rid": "gone"})
    k3.wait_idle()
    k3.flush()  # refused while anything is held
    answer = k3.generate(ids, 8)
    assert answer.ids == cold(k3, ids, 8)
