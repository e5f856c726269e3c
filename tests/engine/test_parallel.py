"""Two processes on two cores: tensor, expert and pipeline parallel, against values of the released reference."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.checkpoints import damage_last_expert, with_changed_shard
from tests.engine.conftest import two_free_ports
from tests.engine.stack import Engine, Stack, running

RANKS = 2
PROMPTS = ("len1", "len7", "len64", "len200")
MAX_LOGPROB_ERROR = 1e-3
LEAST_CUT_TOKENS = 64
"""What a prompt must be longer than for the launcher's cost of a cut on a CPU (32 tokens at a chance of one half)."""
STAGES = "5,4"
"""Layers per pipeline stage: the second begins inside a block of four, and inherits two rows of the residual bank."""

LAYOUTS = {
    # Packed experts of the golden checkpoint are 64 wide: half of one is exactly one group of a shared scale.
    "tp2-packed": ["--tp", "2", "--experts", "packed"],
    "tp2-ep2-unpacked": ["--tp", "2", "--ep", "2", "--experts", "unpacked"],
    "pp2-packed": ["--pp", "2", "--experts", "packed"],
}


@pytest.fixture(scope="module")
def prompts(golden: Path) -> dict[str, Any]:
    """Prompts (``ids``) with the reference's greedy tokens (``greedy``)."""
    return json.loads((golden / "expected" / "prompts.json").read_text())["text"]


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def layout(request: pytest.FixtureRequest) -> str:
    """Name of a way to deal out the model."""
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(golden: Path, layout: str) -> Iterator[Stack]:
    """The golden checkpoint in fp32, dealt out over two processes; one layout is stopped before the next one starts."""
    if len(os.sched_getaffinity(0)) < RANKS:
        pytest.skip(f"{RANKS} ranks need {RANKS} usable cores")
    arguments = ["--model", str(golden / "checkpoint"), "--device", "cpu", "--dtype", "float32", "--constrain", "off"]
    arguments += ["--kv-tokens", "8192", "--state-slots", "48", "--max-running-requests", "4", "--page-size", "1"]
    with contextlib.ExitStack() as until_stopped:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("SGLANG_PP_LAYER_PARTITION", STAGES)
            stack = until_stopped.enter_context(running([*arguments, *LAYOUTS[layout]], *two_free_ports()))
        yield stack


@pytest.fixture
def engine(ranks: Stack) -> Iterator[Engine]:
    """Its engine with an empty prefix cache."""
    client = Engine(ranks.engine_url)
    with client.http:
        client.flush()
        yield client


def test_two_processes_give_the_references_greedy_tokens_cold_and_after_a_prefix_hit(
    engine: Engine, prompts: dict[str, Any]
) -> None:
    for name in PROMPTS:
        ids, greedy = prompts[name]["ids"], tuple(prompts[name]["greedy"])
        assert engine.generate(ids, 24).ids == greedy, name
        assert engine.generate(ids, 24).ids == greedy, name  # leaves a state before the last token of long prompts
        again = engine.generate(ids, 24)
        assert again.ids == greedy, name
        assert again.cached_tokens == (len(ids) - 1 if len(ids) > LEAST_CUT_TOKENS else 0), name


def test_two_processes_give_the_same_tokens_to_requests_that_run_together(
    engine: Engine, prompts: dict[str, Any]
) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = pool.map(lambda name: engine.generate(prompts[name]["ids"], 24).ids, PROMPTS)
    assert list(answers) == [tuple(prompts[name]["greedy"]) for name in PROMPTS]


def test_two_processes_give_the_references_log_probabilities(
    engine: Engine, golden: Path, prompts: dict[str, Any]
) -> None:
    logits = load_file(golden / "expected" / "text_logits.safetensors")
    for name in PROMPTS[1:]:
        ids = prompts[name]["ids"]
        reference = torch.log_softmax(logits[f"{name}.fp32"].double(), -1)
        wanted = reference[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        got = torch.tensor(engine.prompt_logprobs(ids), dtype=torch.float64)
        assert (got - wanted).abs().max().item() <= MAX_LOGPROB_ERROR, name
        engine.flush()


def test_ranks_keep_and_drop_the_same_checkpoints(engine: Engine, layout: str, prompts: dict[str, Any]) -> None:
    """More checkpoints than slots, some requests together; every rank chooses for itself."""
    text = prompts["len200"]["ids"]
    for start in range(40):
        engine.generate(text[start : start + 60 + start], 3)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda start: engine.generate(text[start : start + 150], 3), range(12)))
    engine.wait_idle()
    checked = engine.cache("check")
    assert [one["problems"] for one in checked] == [[]] * len(checked)
    assert len({one["digest"] for one in checked}) == 1
    assert checked[0]["checkpoints"] > 10
    if layout.startswith("tp"):
        assert [one["tp_rank"] for one in checked] == list(range(RANKS))
    (counted,) = engine.cache("metrics")
    assert sum(counted["metrics"]["evicted"].values()) > 0


def test_ranks_keep_one_set_of_weights_when_one_of_them_finds_a_damaged_expert(
    engine: Engine, layout: str, golden: Path, prompts: dict[str, Any], tmp_path: Path
) -> None:
    """With expert parallelism the second rank alone reads the last expert; tensor-parallel ranks all do."""
    ids, greedy = prompts["len64"]["ids"], tuple(prompts["len64"]["greedy"])
    damaged = with_changed_shard(golden / "checkpoint", tmp_path / "damaged", damage_last_expert)
    status, message = engine.update_weights(damaged)
    assert status == HTTPStatus.BAD_REQUEST
    if layout.startswith("pp"):
        assert message.startswith("no weights were changed: pipeline stages cannot agree")
    else:
        assert message.endswith("were loaded again.")
        assert engine.update_weights(golden / "checkpoint")[0] == HTTPStatus.OK
    engine.flush()
    assert engine.generate(ids, 24).ids == greedy
