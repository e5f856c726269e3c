"""Our KDA kernels against SGLang's Triton kernels for GPUs, which Triton's interpreter runs on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("triton_kda_program.py")

EXACT = 1e-6
"""Kernels that compute in float32 throughout."""

ROUNDED = 2**-8
"""SGLang's prefill rounds what passes between blocks of 16 tokens to bfloat16, 2^-9 each; ours does not."""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    """Differences by case, from a process of its own: SGLang and the interpreter change a process for good."""
    for package in ("sglang", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
def test_decode_gives_the_same_outputs_and_states(found: dict[str, dict[str, float]]) -> None:
    assert found["decode"]["output"] <= EXACT
    assert found["decode"]["state"] <= EXACT


@pytest.mark.timeout(600)
def test_prefill_within_one_block_gives_the_same_outputs_and_states(found: dict[str, dict[str, float]]) -> None:
    assert found["prefill 16+5+1"]["output"] <= EXACT
    assert found["prefill 16+5+1"]["state"] <= EXACT


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["prefill 64", "prefill 17+70"])
def test_prefill_over_blocks_and_chunks_differs_by_rounding_only(found: dict[str, dict[str, float]], case: str) -> None:
    assert found[case]["output"] <= ROUNDED
    assert found[case]["state"] <= ROUNDED
