"""Our GPU path fits SGLang's real classes: built and called on a CPU, in one process of its own (gpu_contracts.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def facts(tiny_dir: Path, repository: Path) -> Any:
    """What the program found."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.model.gpu_contracts", str(tiny_dir)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=environment, cwd=repository, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_experts_are_loaded_as_sglangs_own_loader_would(facts: Any) -> None:
    """Whole, split over two ranks, and dealt out over two ranks."""
    assert facts["loads like upstream"] == {"(0, 1, 1)": True, "(1, 2, 1)": True, "(1, 2, 2)": True}


def test_sglangs_expert_layer_computes_what_our_cpu_experts_do(facts: Any) -> None:
    """With and without padding of the latent; bfloat16, SGLang rounds the weighted sum once more."""
    assert facts["native difference"].keys() == {"256", "192"}
    assert all(0 < difference < 1e-2 for difference in facts["native difference"].values())


def test_weights_are_rewritten_for_kernels_once_and_loading_again_starts_from_the_files_layout(facts: Any) -> None:
    assert facts["reload"] and all(facts["reload"].values())


def test_the_layer_really_gets_the_runner_the_table_says(facts: Any) -> None:
    methods = facts["methods"]
    assert (methods["hopper auto"], methods["blackwell auto"]) == ("marlin", "flashinfer_mxfp4")
    for refused in ("hopper flashinfer_mxfp4", "blackwell triton_kernel", "ampere auto"):
        assert methods[refused].startswith("ExpertMethodError"), methods[refused]


def test_marlins_activation_kernel_is_our_situ(facts: Any) -> None:
    assert facts["situ kernel"] < 1e-4


def test_sglangs_kda_backend_reads_from_our_layer_what_it_reads_from_its_own(facts: Any) -> None:
    kda = facts["kda"]
    pairs = {name: pair for name, pair in kda.items() if name != "rows of in_proj"}
    assert len(pairs) == 10
    for name, (ours, theirs) in pairs.items():
        assert ours == theirs, name
    assert kda["rows of in_proj"] % 8 == 0


def test_every_attention_backend_takes_our_call_and_all_forms_agree(facts: Any) -> None:
    assert len(facts["mla"]) == 13
    assert all(difference < 1e-5 for difference in facts["mla"].values())


def test_the_stack_never_looks_at_a_value(facts: Any) -> None:
    """On the meta device a look at a value is an error; on a GPU it would be a wait, or a broken graph capture."""
    assert len(facts["stack"]) == 9
    for output, device, attended, expert_layers in facts["stack"].values():
        assert output.startswith("(4, ") and output.endswith("torch.bfloat16") and device == "meta"
        assert attended == expert_layers + 1 > 1


def test_settings_our_layers_cannot_honour_are_refused_together(facts: Any) -> None:
    refused = facts["refused"]
    assert refused["supported"] == "nothing"
    for name in ("speculative-algorithm", "kv-cache-dtype", "cuda-graph-backend-prefill"):
        assert name in refused["unsupported"]
    assert "--disable-chunked-prefix-cache" in refused["chunked prefix cache"]
