"""Checkpoints stored as int8 in a pool of their own, in the real engine: where they lie, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.conftest import two_free_ports
from tests.engine.stack import Engine, Stack, running
from tests.engine.test_prefix_cache import prompt

STORED = 10
CONFIGURATION = f"""
model: tiny-random
served_name: tiny
device: cpu
cache: k3
checkpoint_format: int8
checkpoint_slots: {STORED}
kv_tokens: 6144
state_slots: 12
max_running_requests: 3
page_size: 1
chunked_prefill_tokens: 1024
log_level: warning
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    file: Path = tmp_path_factory.mktemp("stored") / "stored.yaml"
    file.write_text(CONFIGURATION, encoding="utf-8")
    with running(["--config", str(file)], *two_free_ports()) as started:
        yield started


@pytest.fixture
def engine(stack: Stack) -> Iterator[Engine]:
    """The engine, empty; afterwards index, tree and pools agree."""
    with Engine.empty(stack.engine_url) as client:
        yield client


def test_sessions_go_on_from_stored_states_at_exact_ends(engine: Engine) -> None:
    ids = prompt(300, seed=1)
    for _ in range(8):
        answer = engine.generate(ids, 16)
        ids = ids + list(answer.ids) + prompt(20, seed=len(ids))
        following = engine.generate(ids, 1)
        assert following.cached_tokens == answer.prompt_tokens + 15


def test_a_restored_state_is_close_to_the_one_that_was_kept(engine: Engine) -> None:
    """Not equal: most first tokens agree, as they would in no case if states were mixed up."""
    agreeing = 0
    for seed in range(12):
        ids = prompt(200, seed=seed)
        first = engine.generate(ids, 1)
        longer = ids + list(first.ids) + prompt(3, seed=50 + seed)
        warm = engine.generate(longer, 4)
        assert warm.cached_tokens == len(ids)
        engine.flush()
        agreeing += warm.ids[0] == engine.generate(longer, 4).ids[0]
    assert agreeing >= 8, f"{agreeing} of 12 first tokens agree"


def test_a_full_pool_of_checkpoints_evicts_and_never_stops_the_engine(engine: Engine) -> None:
    prompts = [prompt(150 + 10 * i, seed=200 + i) for i in range(3 * STORED)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda ids: engine.generate(ids, 6), prompts))
    engine.wait_idle()
    (checked,) = engine.cache("check")
    assert 0 < checked["checkpoints"] <= STORED
    (tree,) = engine.cache("dump")
    assert tree["stored_slots"] == {"total": STORED, "free": STORED - checked["checkpoints"]}
    (held,) = engine.cache("states")
    assert len(set(held["states"].values())) == checked["checkpoints"], "every text has a state of its own"
    assert engine.generate(prompts[-1] + prompt(5, seed=3), 2).cached_tokens > 0
