"""The names taken from SGLang exist in the installed version, and the plugin changes only what it should.

SGLang is imported in processes of their own: importing it changes a process for good.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3_sglang import compat
from k3_sglang.tiny import build

RESOLVE = """
import json, pkgutil
from k3_sglang import compat
problems = {}
for name, target in [*compat.UPSTREAM.items(), *compat.HOOK_TARGETS.items()]:
    try:
        pkgutil.resolve_name(target)
    except Exception as error:
        problems[name] = repr(error)
print(json.dumps(problems))
"""

REGISTER = """
import json, os
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.linear import kda_backend
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.platforms import current_platform
model, _ = ModelRegistry.resolve_model_cls(["KimiK3ForConditionalGeneration"])
print(json.dumps({
    "model": model.__module__,
    "kda": kda_backend.KDAAttnBackend.__module__,
    "mla": "k3_cpu" in ATTENTION_BACKENDS,
    "platform": type(current_platform).__module__,
}))
"""

PRETEND_ACCELERATOR = """
import torch
torch.accelerator.is_available = lambda: True
"""


def run(code: str, **environment: str) -> Any:
    """Last line of a program's output, as JSON."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_installed_sglang_is_the_one_everything_was_checked_on() -> None:
    assert importlib.metadata.version("sglang") == compat.SGLANG_VERSION


def test_every_upstream_name_and_hook_target_resolves() -> None:
    assert run(RESOLVE) == {}


def test_an_unknown_name_says_where_to_add_it() -> None:
    with pytest.raises(AttributeError, match="add it to UPSTREAM"):
        compat.resolve("NoSuchThing")


def test_no_other_module_names_sglang_internals(repository: Path) -> None:
    for path in (repository / "k3_sglang").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name != "compat.py":
            assert "import sglang" not in text and "from sglang" not in text, path


CONV_DTYPES = """
import json, torch
from k3_sglang.backends.kda_cpu import check_conv_dtype
refused = []
for state, activations in [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16),
                           (torch.bfloat16, torch.float32), (torch.bfloat16, torch.float16)]:
    try:
        check_conv_dtype(state, activations)
    except ValueError:
        refused.append(f"{state} {activations}".replace("torch.", ""))
print(json.dumps(refused))
"""


def test_convolution_states_that_would_round_activations_are_refused() -> None:
    assert run(CONV_DTYPES) == ["bfloat16 float32", "bfloat16 float16"]


def test_without_an_accelerator_model_backends_and_platform_are_ours() -> None:
    assert run(REGISTER) == {
        "model": "k3_sglang.models.kimi_k3",
        "kda": "k3_sglang.backends.kda_cpu",
        "mla": True,
        "platform": "k3_sglang.platform_cpu",
    }


def test_with_an_accelerator_upstreams_model_and_kernels_stay() -> None:
    code = PRETEND_ACCELERATOR + REGISTER.replace("type(current_platform).__module__", "'not asked'")
    found = run(code)
    assert found["kda"] == "sglang.srt.layers.attention.linear.kda_backend"
    assert found["mla"] is False
    assert found["model"] != "k3_sglang.models.kimi_k3"


MULTIMODAL = """
import json
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.configs.model_config import ModelConfig
def decided(directory, **choice):
    return bool(ModelConfig(model_path=directory, dtype="bfloat16", **choice).is_multimodal)
"""


@pytest.mark.parametrize("before", ["", PRETEND_ACCELERATOR], ids=["cpu", "accelerator"])
def test_images_are_on_where_our_model_serves_a_checkpoint_that_has_what_they_need(before: str, tmp_path: Path) -> None:
    """On an accelerator upstream's class is served, whose processor needs code of the checkpoint: text only."""
    whole = build(tmp_path / "whole")
    without_rules = Path(shutil.copytree(whole, tmp_path / "without_rules"))
    (without_rules / "preprocessor_config.json").unlink()
    without_tower = Path(shutil.copytree(whole, tmp_path / "without_tower"))
    config = json.loads((whole / "config.json").read_text())
    del config["vision_config"]
    (without_tower / "config.json").write_text(json.dumps(config))
    decisions = [f"decided({str(path)!r})" for path in (whole, without_rules, without_tower)]
    decisions.append(f"decided({str(whole)!r}, enable_multimodal=False)")
    found = run(f"{before}{MULTIMODAL}print(json.dumps([{', '.join(decisions)}]))")
    assert found == [not before, False, False, False]


def test_with_an_accelerator_our_model_class_can_be_chosen() -> None:
    code = PRETEND_ACCELERATOR + REGISTER.replace("type(current_platform).__module__", "'not asked'")
    found = run(code, K3_SGLANG_MODEL_IMPL="plugin")
    assert found["model"] == "k3_sglang.models.kimi_k3"
    assert found["kda"] == "sglang.srt.layers.attention.linear.kda_backend"


def test_the_platform_steps_back_for_upstreams_own_cpu_engine() -> None:
    code = "import json; from k3_sglang.platform_cpu import resolve; print(json.dumps({'platform': resolve()}))"
    assert run(code) == {"platform": "k3_sglang.platform_cpu.K3CpuPlatform"}
    assert run(code, SGLANG_USE_CPU_ENGINE="1") == {"platform": None}
