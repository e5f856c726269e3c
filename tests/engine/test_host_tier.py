"""SGLang's host tier under our cache: what the device pools could not hold comes back from host memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import two_free_ports
from tests.engine.stack import Engine, running
from tests.engine.test_prefix_cache import prompt

PROMPT_TOKENS = 900
SESSIONS = 6
CONFIGURATION = """
model: tiny-random
served_name: tiny
device: cpu
cache: k3
kv_tokens: 3072
state_slots: 8
max_running_requests: 2
page_size: 1
chunked_prefill_tokens: 1024
log_level: warning
engine:
  enable-hierarchical-cache: true
  hicache-ratio: 4.0
  hicache-io-backend: direct
  hicache-mem-layout: page_first_direct
  hicache-write-policy: {policy}
"""


@pytest.fixture(scope="module", params=["write_through", "write_back"])
def engine_of_policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose device pools hold three of six sessions, and whose host pools hold all."""
    file: Path = tmp_path_factory.mktemp("host_tier") / "host_tier.yaml"
    file.write_text(CONFIGURATION.format(policy=request.param), encoding="utf-8")
    with running(["--config", str(file)], *two_free_ports()) as stack, Engine(stack.engine_url) as client:
        yield client


def check(engine: Engine) -> None:
    """Index and tree agree."""
    engine.wait_idle()
    (checked,) = engine.cache("check")
    assert checked["problems"] == []


def test_sessions_go_on_from_host_memory_with_the_tokens_of_cold_runs(engine_of_policy: Engine) -> None:
    engine = engine_of_policy
    prompts = [prompt(PROMPT_TOKENS, seed=i) for i in range(SESSIONS)]
    answers = [engine.generate(ids, 4) for ids in prompts]
    check(engine)
    pairs = zip(prompts, answers, strict=True)
    longer = [ids + list(answer.ids) + prompt(15, seed=90 + i) for i, (ids, answer) in enumerate(pairs)]
    warm = [engine.generate(ids, 12) for ids in longer]
    check(engine)
    assert [answer.cached_tokens for answer in warm] == [PROMPT_TOKENS + 3] * SESSIONS
    again = [engine.generate(ids, 12) for ids in reversed(longer)][::-1]
    check(engine)
    assert [answer.ids for answer in again] == [answer.ids for answer in warm]
    for ids, answer in zip(longer, warm, strict=True):
        engine.flush()
        alone = engine.generate(ids, 12)
        assert alone.cached_tokens == 0
        assert answer.ids == alone.ids
