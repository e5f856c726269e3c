"""Contracts through the engine's own grammar backend: a sample of benchmarks/constrained.py for each mode."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from benchmarks.constrained import MODES, count, freely, through_gateway
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.tiny.checkpoint import ensure
from tests.engine.stack import Engine, Stack

GENERATIONS = 12


@pytest.fixture(scope="module")
def tokenizer() -> K3Tokenizer:
    """The tiny model's tokenizer."""
    return K3Tokenizer.from_dir(ensure())


@pytest.fixture
def gateway(stack: Stack) -> Iterator[httpx.Client]:
    """The session's gateway."""
    with httpx.Client(base_url=stack.gateway_url, timeout=300, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("mode", MODES)
def test_untrained_weights_held_to_short_turns_keep_every_contract(gateway: httpx.Client, mode: str) -> None:
    counts, faults = count(mode, GENERATIONS, lambda body, number: through_gateway(gateway, body, number))
    assert faults == []
    assert counts["valid"] == GENERATIONS


@pytest.mark.parametrize("mode", MODES)
def test_under_the_grammar_of_a_trained_model_no_finished_turn_breaks_its_contract(
    engine: Engine, tokenizer: K3Tokenizer, mode: str
) -> None:
    counts, faults = count(mode, GENERATIONS, lambda body, number: freely(engine.http, tokenizer, body, number))
    assert faults == []
    assert counts["valid"] >= GENERATIONS // 2, counts
