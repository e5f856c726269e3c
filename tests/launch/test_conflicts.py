"""Known-bad combinations: each rule refuses its case, and lets the nearest good one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3_sglang.launch import resolve as stage
from k3_sglang.launch.__main__ import main
from k3_sglang.launch.conflict_rules import RULES
from k3_sglang.launch.conflicts import Facts, broken

DSPARK = {"speculative-algorithm": "DSPARK", "speculative-draft-model-path": "/draft", "pp-size": "1"}
REPLAYED = {**DSPARK, "enable-linear-replayssm-spec": None}
PREFILL = {"disaggregation-mode": "prefill"}
HOST_TIER = {"enable-hierarchical-cache": None}
LONG = {"context-length": "262144"}


def facts(flags: Mapping[str, str | None] | None = None, **others: Any) -> Facts:
    return replace(Facts(flags=flags or {}, device="cuda", own_model=False, cache="sglang", gpu="b300"), **others)


CASES: dict[str, tuple[Facts, Facts]] = {
    "speculation on a CPU": (facts({**DSPARK}, device="cpu", gpu=None), facts(DSPARK)),
    "speculation with the k3 cache": (facts(DSPARK, cache="k3"), facts(DSPARK)),
    "disaggregation with the k3 cache": (facts(PREFILL, cache="k3"), facts(PREFILL)),
    "disaggregation on a CPU": (facts(PREFILL, device="cpu", gpu=None), facts(PREFILL)),
    "decode context parallelism with the k3 cache": (
        facts({"dcp-size": "8"}, cache="k3"),
        facts({"dcp-size": "1"}, cache="k3"),
    ),
    "decode context parallelism on Hopper": (
        facts({"dcp-size": "8", "moe-runner-backend": "marlin"}, gpu="h200"),
        facts({"dcp-size": "8"}, gpu="gb300"),
    ),
    "decode context parallelism with symmetric memory": (
        facts({"dcp-size": "8", "enable-symm-mem": None}),
        facts({"dcp-size": "1", "enable-symm-mem": None}),
    ),
    "speculation with decode context parallelism, long contexts": (
        facts({**DSPARK, **LONG, "dcp-size": "8"}),
        facts({**DSPARK, "dcp-size": "8", "context-length": "180000"}),
    ),
    "DSpark's ragged verification with decode context parallelism": (
        facts({**DSPARK, "dcp-size": "8"}, environment={"SGLANG_RAGGED_VERIFY_MODE": "compact"}),
        facts({**DSPARK, "dcp-size": "8"}, environment={"SGLANG_RAGGED_VERIFY_MODE": "static"}),
    ),
    "DSpark in a pipeline": (facts({**DSPARK, "pp-size": "2"}), facts({**DSPARK, **PREFILL, "pp-size": "2"})),
    "DSpark with attention data parallelism": (
        facts({**DSPARK, "attn-dp-size": "2"}),
        facts({**DSPARK, "attn-dp-size": "2", "enable-dp-lm-head": None}),
    ),
    "DSpark without a draft": (facts({"speculative-algorithm": "DSPARK"}), facts(DSPARK)),
    "replay ring": (facts({**REPLAYED, "speculative-dspark-block-size": "8"}), facts(REPLAYED)),
    "replay ring on a prefill engine": (facts({**REPLAYED, **PREFILL}), facts({**DSPARK, **PREFILL})),
    "expert runner": (facts(gpu="h200"), facts({"moe-runner-backend": "marlin"}, gpu="h200")),
    "page size": (facts({"page-size": "1"}), facts({"page-size": "1", "attention-backend": "triton"})),
    "running requests": (
        facts({"mamba-radix-cache-strategy": "no_buffer"}, asked_running=10, asked_slots=29),
        facts({"mamba-radix-cache-strategy": "no_buffer"}, asked_running=10, asked_slots=30),
    ),
    "our model class on a GPU": (facts({"kv-cache-dtype": "fp8_e4m3"}, own_model=True), facts({}, own_model=True)),
    "expert groups of a transport": (
        facts({"moe-a2a-backend": "megamoe", "tp-size": "8", "ep-size": "4"}),
        facts({"moe-a2a-backend": "megamoe", "tp-size": "8", "ep-size": "8"}),
    ),
    "MegaMoE": (
        facts({"moe-a2a-backend": "megamoe", "moe-runner-backend": "marlin"}, gpu="h200"),
        facts({"moe-a2a-backend": "megamoe"}),
    ),
    "expert balancing": (facts({"enable-eplb": None}), facts({"enable-eplb": None, "tp-size": "8", "ep-size": "8"})),
    "int8 states of SGLang with the host tier": (
        facts({"enable-int8-mamba-checkpoint": None, **HOST_TIER}),
        facts({"enable-int8-mamba-checkpoint": None}),
    ),
    "stored checkpoints with the host tier": (
        facts(HOST_TIER, cache="k3", checkpoint_format="int8"),
        facts(HOST_TIER, cache="k3"),
    ),
    "overlapped steps in a pipeline": (facts({"pp-size": "2"}, asked_overlap=True), facts({"pp-size": "2"})),
    "FP8 latents on a CPU": (facts({"kv-cache-dtype": "fp8_e4m3"}, device="cpu", gpu=None), facts({})),
}


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_each_rule_refuses_its_case_and_lets_the_nearest_good_one_pass(name: str) -> None:
    bad, good = CASES[name]
    assert any(f"({name}; " in problem for problem in broken(bad, RULES))
    assert broken(good, RULES) == []


def test_every_rule_says_why_what_to_do_and_who_says_so() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES) == len(CASES)
    assert all(rule.why and rule.remedy and rule.source for rule in RULES)


@pytest.mark.parametrize(
    ("gpu", "runner", "good"),
    [
        ("b300", "auto", True),
        ("b300", "marlin", True),
        ("b200", "triton", False),
        ("gb300", "triton_kernel", False),
        ("h200", "flashinfer_mxfp4", False),
        ("h100", "marlin", True),
        ("mi355x", "auto", True),
        ("mi355x", "marlin", False),
    ],
)
def test_expert_runners_by_kind_of_gpu(gpu: str, runner: str, good: bool) -> None:
    assert (broken(facts({"moe-runner-backend": runner}, gpu=gpu), RULES) == []) is good


def test_a_launch_with_a_known_bad_combination_ends_before_anything_is_looked_at(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "cuda_devices", lambda: 8)
    file = tmp_path / "bad.yaml"
    text = f"model: {checkpoint}\ndevice: cuda\ngpu: h200\ntp: 8\nport: 0\nengine: {{load-format: dummy}}\n"
    file.write_text(text, encoding="utf-8")
    assert main(["--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert "launch: error: moe-runner-backend auto on h200: it unpacks experts to bfloat16" in error
    assert "use marlin on Hopper" in error
    assert main(["plan", "--config", str(file)]) == 1
    assert "moe-runner-backend auto on h200" in " ".join(capsys.readouterr().out.split())


def test_a_launch_whose_weights_do_not_fit_says_by_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "small.yaml"
    file.write_text("gpu: h200\ntp: 8\nep: 8\nengine: {moe-runner-backend: marlin}\n", encoding="utf-8")
    assert main(["plan", "--config", str(file)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "does not fit" in shown and "too little on each GPU" in shown
