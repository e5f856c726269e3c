"""Recorded mistakes, made in the weights of the running engine: comparisons through HTTP see them.

The golden engine takes the weights while it runs (``/update_weights_from_disk``), which needs no server of its own;
every test ends with the right weights loaded again. Broken checkpoints are not tried this way: SGLang 0.5.23 answers a
failed update by reading the same broken files again, which ends its scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3_sglang.parity.compare import FP32, agreement
from k3_sglang.parity.engine import ScoredEngine
from k3_sglang.parity.golden import Golden
from k3_sglang.parity.mutations import MUTATIONS
from tests.engine.stack import Engine

SEEN_BY_THE_ENGINE = (
    "a_log_last_entries",
    "attnres_norm_weight_ignored",
    "conv_taps_reversed",
    "mla_kv_b_blocked_layout",
    "router_bias_ignored",
    "mxfp4_nibble_swap",
)
"""One mistake per part of the model; all the others are shown with the reference model."""

PROMPT = "len64"


@pytest.fixture(scope="module")
def data(golden: Path) -> Golden:
    """Golden prompts and values."""
    return Golden(golden)


@pytest.fixture
def load(golden_engine: Engine, data: Golden) -> Iterator[Callable[[Path], dict[str, Any]]]:
    """Give the running engine other weights; the right ones come back at the end."""

    def update(checkpoint: Path) -> dict[str, Any]:
        golden_engine.wait_idle()
        body = {"model_path": str(checkpoint), "flush_cache": True}
        return golden_engine.http.post("/update_weights_from_disk", json=body).json()

    yield update
    answer = update(data.checkpoint)
    assert answer["success"], answer
    prompt = data.prompt(PROMPT)
    assert golden_engine.generate(prompt.ids, len(prompt.greedy)).ids == prompt.greedy


@pytest.mark.parametrize("name", SEEN_BY_THE_ENGINE)
def test_a_mistake_in_weights_is_seen_through_the_engine(
    golden_engine: Engine, load: Callable[[Path], dict[str, Any]], data: Golden, tmp_path: Path, name: str
) -> None:
    answer = load(MUTATIONS[name].write(data, tmp_path))
    assert answer["success"], answer
    prompt = data.prompt(PROMPT)
    scores = ScoredEngine(golden_engine.http, data.config.text.vocab_size).score(prompt.ids)
    compared = agreement(scores.prompt, data.logits(prompt, "float32"))
    assert not compared.within(FP32)
    recorded = json.loads((data.directory / "mutations.json").read_text())["text"][name]
    assert 1 - compared.top1 == pytest.approx(recorded["top1_changed"], abs=0.001)
