"""Text prompts on the golden checkpoint, served by the engine, against values of the released reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.stack import Engine

PROMPTS = ("len1", "len7", "len64", "len200")
MAX_LOGPROB_ERROR = 1e-3


@pytest.fixture(scope="module")
def expected(golden: Path) -> dict[str, Any]:
    """Prompts with the reference's greedy tokens."""
    return json.loads((golden / "expected" / "prompts.json").read_text())["text"]


@pytest.fixture(scope="module")
def logits(golden: Path) -> dict[str, torch.Tensor]:
    """The reference's fp32 logits at every prompt position."""
    return load_file(golden / "expected" / "text_logits.safetensors")


@pytest.mark.parametrize("name", PROMPTS)
def test_24_greedy_tokens_equal_the_reference_cold_and_after_a_prefix_hit(
    golden_engine: Engine, expected: dict[str, Any], name: str
) -> None:
    golden_engine.flush()
    ids, greedy = expected[name]["ids"], tuple(expected[name]["greedy"])
    assert golden_engine.generate(ids, 24).ids == greedy
    assert golden_engine.generate(ids, 24).ids == greedy


@pytest.mark.parametrize("name", PROMPTS[1:])
def test_prompt_log_probabilities_equal_the_reference(
    golden_engine: Engine, expected: dict[str, Any], logits: dict[str, torch.Tensor], name: str
) -> None:
    golden_engine.flush()
    ids = expected[name]["ids"]
    reference = torch.log_softmax(logits[f"{name}.fp32"].double(), -1)
    wanted = reference[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    got = torch.tensor(golden_engine.prompt_logprobs(ids), dtype=torch.float64)
    assert (got - wanted).abs().max().item() <= MAX_LOGPROB_ERROR
