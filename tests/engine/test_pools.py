"""SGLang's own cache, pools that are too small, pages of 64 tokens, overlapped steps, text only.

The session's server (``conftest.py``) runs as `make serve` does: our cache, large pools, pages of one token, images.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from k3_sglang.tiny import build
from tests.engine.conftest import two_free_ports
from tests.engine.stack import STOP_TIMEOUT_S, Engine, Stack, running
from tests.engine.test_launch import FAILED, alive, descendants
from tests.engine.test_prefix_cache import prompt

PAGE_SIZE = 64
KV_TOKENS = 1024
STATE_SLOTS = 24
CONTEXT_LEN = KV_TOKENS - 2 * PAGE_SIZE
"""The launcher's choice: the engine keeps two pages back."""
DECODE_SNAPSHOT_TOKENS = 256
"""While decoding, the scheduler keeps the state each time a sequence's length is a multiple of this."""

CONFIGURATION = f"""
model: {{model}}
constrain: "on"
device: cpu
cache: sglang
kv_tokens: {KV_TOKENS}
state_slots: {STATE_SLOTS}
page_size: {PAGE_SIZE}
chunked_prefill_tokens: 256
overlap: "on"
log_level: warning
engine:
  schedule-conservativeness: 0.1  # admit requests without reserving room for their output: the pool runs full
"""


@pytest.fixture(scope="module")
def small_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("small")
    file, model = folder / "small.yaml", build(folder / "text-only")
    (model / "preprocessor_config.json").unlink()
    file.write_text(CONFIGURATION.format(model=model), encoding="utf-8")
    with running(["--config", str(file)], *two_free_ports()) as started:
        yield started


@pytest.fixture
def small(small_stack: Stack) -> Iterator[Engine]:
    """The small engine with an empty prefix cache."""
    client = Engine(small_stack.engine_url)
    with client.http:
        client.flush()
        yield client
        client.wait_idle()


def cold(engine: Engine, ids: list[int], max_new_tokens: int) -> tuple[int, ...]:
    """What a request gives when nothing is cached."""
    engine.flush()
    answer = engine.generate(ids, max_new_tokens, ignore_eos=False)
    assert answer.cached_tokens == 0
    return answer.ids


def test_the_server_runs_as_configured_and_says_how_many_requests_it_runs(small: Engine, small_stack: Stack) -> None:
    assert small.http.get("/server_info").json()["disable_overlap_schedule"] is False
    table = "\n".join(small_stack.output)
    assert f"{KV_TOKENS} tokens in pages of {PAGE_SIZE}" in table
    assert f"{CONTEXT_LEN} tokens" in table
    assert "4 (8 asked for; the pools allow no more)" in table


def test_a_model_without_rules_for_pictures_serves_text_says_so_and_refuses_pictures(
    small: Engine, small_stack: Stack
) -> None:
    table = "\n".join(small_stack.output)
    assert "images            off: the checkpoint has no preprocessor_config.json" in table
    assert "image-tower tensors not loaded, text only: the checkpoint has no preprocessor_config.json" in table
    body = {"input_ids": [1, 2], "image_data": ["data:image/png;base64,AAAA"], "sampling_params": {"max_new_tokens": 1}}
    response = small.http.post("/generate", json=body)
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert "as text only" in response.json()["error"]["message"]


@pytest.mark.parametrize(("prompt_len", "new_tokens"), [(100, 300), (256, 1), (250, 7), (1, 520)])
def test_a_state_kept_while_decoding_is_the_state_of_a_cold_run(
    small: Engine, prompt_len: int, new_tokens: int
) -> None:
    ids = prompt(prompt_len, seed=prompt_len)
    answer = small.generate(ids, new_tokens)
    longer = ids + list(answer.ids) + prompt(9, seed=2)
    warm = small.generate(longer, 24, ignore_eos=False)
    length = prompt_len + new_tokens
    assert warm.cached_tokens == length // DECODE_SNAPSHOT_TOKENS * DECODE_SNAPSHOT_TOKENS
    assert warm.ids == cold(small, longer, 24)


def test_requests_that_are_retracted_because_the_pool_is_full_give_the_same_tokens(
    small: Engine, small_stack: Stack
) -> None:
    """Four answers need 1.3 times the pool, and the engine lets them all in: it reserves little for one that runs.

    Only requests that enter in the same step, or that ignore the stop id, are reserved for in full; so each waits for
    the first token of the one before and has a least length instead.
    """
    prompts = [prompt(40 + 7 * i, seed=400 + i) for i in range(4)]
    new_tokens = 290
    sampling = {"ignore_eos": False, "min_new_tokens": new_tokens}
    alone = []
    for ids in prompts:
        small.flush()
        alone.append(small.generate(ids, new_tokens, **sampling).ids)
    small.flush()
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = []
        for ids in prompts:
            begun = threading.Event()
            running.append(pool.submit(small.stream, ids, new_tokens, begun, **sampling))
            assert begun.wait(60), "no first token came"
        together = [answer.result(60) for answer in running]
    small_stack.wait_for_output("Retract requests")
    assert together == alone
    assert {len(ids) for ids in together} == {new_tokens}


def test_more_prefixes_than_both_pools_hold_never_change_an_answer(small: Engine) -> None:
    chooser = random.Random(1)
    heads = [prompt(length, seed=900 + length) for length in (70, 130, 200, 300)]
    prompts = [chooser.choice(heads) + prompt(chooser.randrange(1, 150), seed=2000 + i) for i in range(12)]
    alone = [cold(small, ids, 16) for ids in prompts]
    small.flush()
    order = chooser.choices(range(len(prompts)), k=36)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: small.generate(prompts[i], 16, ignore_eos=False), order))
    assert [answer.ids for answer in answers] == [alone[i] for i in order]
    assert sum(answer.cached_tokens for answer in answers) > 0


@pytest.mark.parametrize("new_tokens", [8, 64])
def test_a_request_as_long_as_the_context_runs_and_a_longer_one_is_refused(small: Engine, new_tokens: int) -> None:
    answer = small.generate(prompt(CONTEXT_LEN - new_tokens, seed=3), new_tokens)
    assert len(answer.ids) >= new_tokens - 2  # SGLang ends a request two tokens early
    longer = {"input_ids": prompt(CONTEXT_LEN + 1, seed=1), "sampling_params": {"max_new_tokens": 1}}
    response = small.http.post("/generate", json=longer)
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert "longer than the model's context length" in response.text


def test_a_killed_detokenizer_ends_the_launcher_with_a_message(small_stack: Stack) -> None:
    """The last test of this server. The engine itself does not notice: it goes on and answers nothing."""
    below = descendants(small_stack.process.pid)
    (detokenizer,) = (pid for pid in below if b"detokenizer" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(detokenizer, signal.SIGKILL)
    assert small_stack.process.wait(STOP_TIMEOUT_S) == FAILED
    assert small_stack.pump is not None
    small_stack.pump.join(STOP_TIMEOUT_S)
    assert any(f"worker process {detokenizer} is gone" in line for line in small_stack.output)
    assert [pid for pid in below if alive(pid)] == []
