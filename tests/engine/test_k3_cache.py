"""The checkpoint cache in the real engine, small pools: exact ends, forks, heads, tokens equal to cold runs.

Everything runs three times: with pages of one token, with overlapped steps, and with overlapped steps and pages of 64.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.engine.k3_cache import STATE_SLOTS, Mode, cold
from tests.engine.stack import Engine
from tests.engine.test_prefix_cache import prompt

SHARED = 700
"""Tokens of a common head."""


def test_the_engine_says_that_our_cache_is_the_one_in_use_and_how_it_runs(k3: Engine, mode: Mode) -> None:
    server = k3.http.get("/server_info").json()
    assert server["radix_cache_backend"] == "k3"
    assert server["mamba_radix_cache_strategy"] == "no_buffer"
    assert server["page_size"] == mode.page_size
    assert server["disable_overlap_schedule"] is (mode.overlap == "off")


def test_counters_and_the_tree_can_be_read_from_outside(k3: Engine, mode: Mode) -> None:
    (before,) = k3.cache("metrics")
    ids = prompt(130, seed=44)
    k3.generate(ids, 64)
    (after,) = k3.cache("metrics")
    assert after["metrics"]["prompt_tokens"] - before["metrics"]["prompt_tokens"] == len(ids)
    (tree,) = k3.cache("dump")
    ends = {node["end"]: node["checkpoint"]["role"] for node in tree["nodes"] if node["checkpoint"]}
    assert ends == {mode.floor(130): "prompt_end", mode.floor(130 + 63): "tip"}
    assert tree["slots"] == {"total": STATE_SLOTS, "free": STATE_SLOTS - 2}
    (checked,) = k3.cache("check")
    assert (checked["problems"], checked["checkpoints"]) == ([], 2)
    assert k3.http.get("/k3/cache/dump?nodes=3").status_code == httpx.codes.BAD_REQUEST


def test_a_checkpoint_knows_how_often_it_was_used_and_what_that_saved(k3: Engine, mode: Mode) -> None:
    ids = prompt(130, seed=45)
    answer = k3.generate(ids, 64)
    for seed in (5, 6):
        k3.generate([*ids, *answer.ids, *prompt(11, seed=seed)], 2)
    (tree,) = k3.cache("dump")
    assert tree["checkpoint_bytes"] > 0
    assert tree["kv_token_bytes"] > 0
    used = {node["end"]: node["checkpoint"] for node in tree["nodes"] if node["checkpoint"] and node["start"] < 194}
    prompt_end, turn_end = mode.floor(130), mode.turn_end(130, 64)
    assert (used[prompt_end]["hits"], used[prompt_end]["saved_tokens"]) == (0, 0)
    assert (used[turn_end]["hits"], used[turn_end]["saved_tokens"]) == (2, 2 * (turn_end - prompt_end))


@pytest.mark.parametrize(
    ("prompt_len", "new_tokens"), [(1, 2), (37, 1), (127, 1), (128, 1), (100, 50), (64, 64), (63, 2), (1500, 7)]
)
def test_the_next_turn_computes_only_what_is_new(k3: Engine, mode: Mode, prompt_len: int, new_tokens: int) -> None:
    ids = prompt(prompt_len, seed=prompt_len)
    answer = k3.generate(ids, new_tokens)
    longer = ids + list(answer.ids) + prompt(11, seed=3)
    warm = k3.generate(longer, 16)
    assert warm.cached_tokens == mode.turn_end(prompt_len, new_tokens)
    assert warm.ids == cold(k3, longer, 16)


@pytest.mark.parametrize("stopped_by", ["stop id at once", "stop id", "stop text", "end of its grammar"])
def test_a_turn_that_stops_by_itself_is_kept_at_the_length_its_state_has(
    k3: Engine, mode: Mode, stopped_by: str
) -> None:
    """With overlapped steps the engine has computed the stop token as well when it learns of it."""
    ids = prompt(190, seed=91)
    free = k3.http.post(
        "/generate",
        json={"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}},
    ).json()
    tokens, text = free["output_ids"], free["text"]
    k3.flush()
    sampling: dict[str, dict[str, object]] = {
        "stop id at once": {"stop_token_ids": [tokens[0]]},
        "stop id": {"stop_token_ids": [tokens[6]]},
        "stop text": {"stop": [text[12:18]]},
        "end of its grammar": {"regex": "[a-z]{9}"},
    }
    answer = k3.generate(ids, 40, **{"ignore_eos": False, **sampling[stopped_by]})
    assert answer.finish == "stop"
    longer = ids + list(answer.ids) + prompt(11, seed=3)
    warm = k3.generate(longer, 16)
    ahead = mode.overlap == "on"
    assert warm.cached_tokens == mode.floor(len(ids) + len(answer.ids) - (not ahead))
    assert warm.ids == cold(k3, longer, 16)


def test_an_aborted_answer_is_kept_as_far_as_it_got(k3: Engine, mode: Mode) -> None:
    ids = prompt(130, seed=32)
    seen: list[int] = []
    aborted = False
    body = {"input_ids": ids, "rid": "stopped", "stream": True}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True}
    with k3.http.stream("POST", "/generate", json=body) as response, Engine(str(k3.http.base_url)) as other:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                seen += json.loads(line.removeprefix("data: "))["output_ids"]
            if len(seen) >= 80 and not aborted:  # a busy engine sends several ids at once
                aborted = True
                other.http.post("/abort_request", json={"rid": "stopped"})
    k3.wait_idle()
    longer = ids + seen + prompt(9, seed=3)
    warm = k3.generate(longer, 16)
    assert len(seen) < 3000
    assert warm.cached_tokens == mode.floor(len(ids) + len(seen) - (mode.overlap == "off"))
    assert warm.ids == cold(k3, longer, 16)


def test_a_path_that_leaves_in_the_middle_is_kept_there_the_first_time(k3: Engine, mode: Mode) -> None:
    head = prompt(SHARED, seed=5)
    first, second, third = (head + prompt(90 + i, seed=60 + i) for i in range(3))
    k3.generate(first, 4)
    forking = k3.generate(second, 4)
    assert (forking.cached_tokens, forking.why_not_more) == (0, "no_state")
    warm = k3.generate(third, 24)
    assert warm.cached_tokens == mode.floor(SHARED)
    further = k3.generate(second + prompt(9, seed=4), 4)
    assert further.cached_tokens == mode.floor(len(second)), "the end of the prompt is kept besides the fork"
    assert warm.ids == cold(k3, third, 24)


def test_a_head_that_the_caller_names_is_shared_from_the_second_session_on(k3: Engine, mode: Mode) -> None:
    head = prompt(SHARED, seed=8)
    hints = {"k3_cache": {"head_len": SHARED, "session": "a"}}
    k3.generate(head + prompt(300, seed=1), 4, custom_params=hints)
    assert k3.generate(head + prompt(200, seed=2), 4).cached_tokens == mode.floor(SHARED)


def test_unreadable_hints_change_nothing(k3: Engine) -> None:
    ids = prompt(120, seed=9)
    good = k3.generate(ids, 8)
    k3.flush()
    bad = k3.generate(ids, 8, custom_params={"k3_cache": {"head_len": "far"}})
    assert bad.ids == good.ids


def test_an_identical_prompt_is_computed_but_for_its_last_token_or_page(k3: Engine, mode: Mode) -> None:
    ids = prompt(1400, seed=12)
    first = k3.generate(ids, 8)
    k3.generate(ids, 8)
    third = k3.generate(ids, 8)
    assert third.cached_tokens == mode.floor(len(ids) - 1)
    assert third.why_not_more == ("whole" if mode.page_size == 1 else "boundary")
    assert third.ids == first.ids


def test_requests_that_arrive_together_compute_their_common_head_once(k3: Engine, mode: Mode) -> None:
    head = prompt(1800, seed=21)
    children = [head + prompt(30 + i, seed=100 + i) for i in range(6)]
    with ThreadPoolExecutor(len(children)) as pool:
        answers = list(pool.map(lambda ids: k3.generate(ids, 6), children))
    assert sorted(answer.cached_tokens for answer in answers) == [0] + [mode.floor(len(head))] * 5
    assert answers[3].ids == cold(k3, children[3], 6)


def test_every_answer_says_why_no_more_of_its_prompt_was_reused(k3: Engine, mode: Mode) -> None:
    ids = prompt(640, seed=61)
    first = k3.generate(ids, 4)
    assert (first.cached_tokens, first.why_not_more) == (0, "no_kv")
    same = k3.generate(ids, 4)
    assert same.why_not_more in ("no_state", "whole", "boundary")
    changed = k3.generate(ids[:400] + prompt(40, seed=1), 4)
    assert (changed.cached_tokens, changed.why_not_more) == (0, "no_state")
    others = [prompt(700, seed=1000 + other) for other in range(12)]  # more than fits
    for other in others:
        k3.generate(other, 2)
    again = [k3.generate(other, 2) for other in others]
    assert {answer.why_not_more for answer in again if not answer.cached_tokens} == {"evicted"}
    (asked,) = k3.cache("metrics")
    assert sum(asked["metrics"]["hits_ended_by"].values()) >= 16


def test_a_streamed_answer_says_it_once(k3: Engine) -> None:
    parameters = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    body = {"input_ids": prompt(200, seed=62), "sampling_params": parameters, "stream": True}
    told = []
    with k3.http.stream("POST", "/generate", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                told += json.loads(line.removeprefix("data: "))["meta_info"].get("k3_cache", [])
    (info,) = told
    assert (info["prompt_tokens"], info["cached_tokens"], info["why_not_more"]) == (200, 0, "no_kv")


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
