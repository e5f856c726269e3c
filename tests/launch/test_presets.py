"""Every preset: its sizes fit, no rule refuses it, and SGLang's own parser and rules take its arguments."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from k3_sglang.launch import dry_run, feasibility
from k3_sglang.launch import resolve as stage
from k3_sglang.launch.__main__ import main
from k3_sglang.launch.flags import Answer, ask, machine_of, task_of
from k3_sglang.launch.planner.command import flags_of, plan_of
from k3_sglang.launch.planner.from_flags import page_size, pool_settings_of
from k3_sglang.launch.planner.hardware import find_gpu
from k3_sglang.launch.planner.layout import Layout
from k3_sglang.launch.planner.plan import Workload
from k3_sglang.launch.planner.pools import PoolSettings, default_memory_fraction
from k3_sglang.launch.planner.release import RELEASE
from k3_sglang.launch.resolve import Resolved, resolve
from k3_sglang.launch.settings import LaunchSettings, read_file, validate

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PRESETS = sorted(path.name for path in CONFIGS.glob("*.yaml"))
GPU_PRESETS = [name for name in PRESETS if name != "tiny.yaml"]
DRAFT = "speculative-draft-model-path"

pytestmark = pytest.mark.timeout(1800)

DEFAULT_FRACTIONS = [
    ("b300", Layout(tp=8), PoolSettings(context_len=8192, chunked_prefill_tokens=16384)),
    ("h200", Layout(tp=16, ep=16, nodes=2), PoolSettings(context_len=8192)),
    ("b200", Layout(tp=8, pp=2, nodes=2), PoolSettings(context_len=8192, max_running_requests=20)),
    ("h100", Layout(tp=32, ep=32, nodes=4), PoolSettings(context_len=8192)),
    ("b300", Layout(tp=8), PoolSettings(context_len=8192, role="decode", max_running_requests=64)),
]
"""GPUs, layouts and settings without a memory fraction, so that SGLang's rule gives one."""


def release_config() -> dict[str, Any]:
    """config.json of the release, from its published dimensions."""
    text, kinds = RELEASE.text, RELEASE.text.layer_kinds
    weights = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True}
    group = {"format": "mxfp4-pack-quantized", "targets": ["Linear"], "weights": {**weights, "dynamic": False}}
    numbers = {
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "intermediate_size": text.dense_intermediate_size,
        "num_hidden_layers": text.num_layers,
        "first_k_dense_replace": text.num_dense_layers,
        "rms_norm_eps": text.rms_norm_eps,
        "max_position_embeddings": text.max_position_embeddings,
        "attn_res_block_size": text.attn_res_block_size,
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "num_attention_heads": text.mla.num_heads,
        "num_key_value_heads": text.mla.num_heads,
        "q_lora_rank": text.mla.q_lora_rank,
        "kv_lora_rank": text.mla.kv_lora_rank,
        "qk_nope_head_dim": text.mla.qk_nope_head_dim,
        "qk_rope_head_dim": text.mla.qk_rope_head_dim,
        "v_head_dim": text.mla.v_head_dim,
        "num_experts": text.moe.num_experts,
        "num_experts_per_token": text.moe.experts_per_token,
        "num_shared_experts": text.moe.num_shared_experts,
        "moe_intermediate_size": text.moe.intermediate_size,
        "routed_expert_hidden_size": text.moe.latent_size,
        "routed_scaling_factor": 1.0,
    }
    linear = {
        "kda_layers": [layer + 1 for layer, kind in enumerate(kinds) if kind == "kda"],
        "full_attn_layers": [layer + 1 for layer, kind in enumerate(kinds) if kind == "mla"],
        "head_dim": text.kda.head_dim,
        "num_heads": text.kda.num_heads,
        "short_conv_kernel_size": text.kda.conv_kernel_size,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    }
    choices = {
        "model_type": "kimi_linear",
        "hidden_act": "situ",
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"],
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "text_config": {**numbers, **choices, "linear_attn_config": linear, "quantization_config": quantization},
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "media_placeholder_token_id": 163605,
    }


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that describes the release and holds no weights."""
    folder = tmp_path_factory.mktemp("Kimi-K3")
    (folder / "config.json").write_text(json.dumps(release_config()), encoding="utf-8")
    (folder / "tiktoken.model").touch()
    draft = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 7168, "num_hidden_layers": 5}
    draft |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 163840}
    draft |= {"intermediate_size": 14336, "max_position_embeddings": 1048576, "dtype": "bfloat16", "block_size": 7}
    (folder / "draft").mkdir()
    (folder / "draft" / "config.json").write_text(json.dumps(draft), encoding="utf-8")
    return folder


def settings_of(name: str, release: Path) -> LaunchSettings:
    """A preset on the described release, at free ports."""
    values = read_file(CONFIGS / name)
    engine = dict(values.get("engine", {}))
    if DRAFT in engine:
        engine[DRAFT] = str(release / "draft")
    return validate({**values, "model": str(release), "engine": engine, "port": 0, "engine_port": 0}, source=name)


@pytest.fixture(scope="module")
def presets(release: Path) -> dict[str, Resolved]:
    """All presets, resolved as on a machine with GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "cuda_devices", lambda: 8)
        found = {name: resolve(settings_of(name, release)) for name in GPU_PRESETS}
        return {**found, "tiny.yaml": resolve(validate(read_file(CONFIGS / "tiny.yaml"), source="tiny.yaml"))}


@pytest.fixture(scope="module")
def answers(presets: dict[str, Resolved], release: Path) -> dict[str, Answer]:
    """SGLang's answers to all presets, to a few defaults, and to a flag it does not have: two processes for all."""
    tasks = {name: task_of(plan) for name, plan in presets.items()}
    for number, (gpu, layout, settings) in enumerate(DEFAULT_FRACTIONS):
        tasks[f"default {number}"] = default_task(release, gpu, layout, settings)
    first = tasks["k3-8xb300.yaml"]
    tasks["unknown flag"] = {**first, "arguments": [*first["arguments"], "--not-a-flag", "1"]}
    tasks["bad value"] = {**first, "arguments": [*first["arguments"], "--kv-cache-dtype", "int3"]}
    tasks["bad rule"] = {**first, "arguments": [*first["arguments"], "--dcp-comm-backend", "a2a"]}
    return dict(zip(tasks, ask(list(tasks.values())), strict=True))


def default_task(release: Path, gpu: str, layout: Layout, settings: PoolSettings) -> dict[str, Any]:
    """A question that leaves the memory fraction to SGLang."""
    words = ["--model-path", str(release), "--device", "cuda", "--tp-size", str(layout.tp), "--pp-size", str(layout.pp)]
    words += ["--ep-size", str(layout.ep), "--chunked-prefill-size", str(settings.chunked_prefill_tokens)]
    if layout.nodes > 1:
        words += ["--nnodes", str(layout.nodes), "--node-rank", "0", "--dist-init-addr", "10.0.0.1:20000"]
    if settings.max_running_requests is not None:
        words += ["--max-running-requests", str(settings.max_running_requests)]
    if settings.role != "none":
        words += ["--disaggregation-mode", settings.role, "--disaggregation-transfer-backend", "nixl"]
    kind = find_gpu(gpu)
    environment = {"K3_SGLANG_MODEL_IMPL": "sglang", "HF_HUB_OFFLINE": "1"}
    return {"arguments": words, "machine": machine_of(kind), "memory_mib": kind.memory_mib, "environment": environment}


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_a_preset_fits_and_breaks_no_rule(name: str, presets: dict[str, Resolved]) -> None:
    assert feasibility.problems(presets[name]) == []
    settings = presets[name].settings
    assert settings.gpu is not None
    plan = plan_of(settings, find_gpu(settings.gpu), RELEASE, Workload(context=8192, concurrent=1, sessions=1))
    assert plan.meets


@pytest.mark.parametrize("name", PRESETS)
def test_sglang_takes_every_argument_of_a_preset(name: str, answers: dict[str, Answer]) -> None:
    assert answers[name].error is None


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_sglang_resolves_a_preset_to_what_the_planner_counted_with(
    name: str, presets: dict[str, Resolved], answers: dict[str, Answer]
) -> None:
    settings, resolved = presets[name].settings, answers[name].resolved
    gpu = find_gpu(str(settings.gpu))
    flags = flags_of(settings)
    assert resolved["page_size"] == page_size(flags, gpu)
    assert resolved["mem_fraction_static"] == settings.engine["mem-fraction-static"]
    assert resolved["moe_runner_backend"] not in ("triton", "triton_kernel")
    assert resolved["disable_overlap_schedule"] is False
    counted = pool_settings_of(flags, gpu, context_len=1)
    assert resolved["max_running_requests"] == counted.max_running_requests
    if settings.disaggregation != "decode":
        assert resolved["mamba_radix_cache_strategy"] == counted.strategy


@pytest.mark.parametrize("number", range(len(DEFAULT_FRACTIONS)))
def test_the_memory_fraction_is_the_one_that_sglangs_rule_gives(number: int, answers: dict[str, Answer]) -> None:
    gpu, layout, settings = DEFAULT_FRACTIONS[number]
    answer = answers[f"default {number}"]
    assert answer.error is None
    ours = default_memory_fraction(find_gpu(gpu).memory_mib, settings, layout)
    assert ours == pytest.approx(answer.resolved["mem_fraction_static"], abs=0.0005)


def test_sglang_refuses_what_it_does_not_have_and_its_words_come_back(answers: dict[str, Answer]) -> None:
    assert "unrecognized arguments: --not-a-flag" in str(answers["unknown flag"].error)
    assert "int3" in str(answers["bad value"].error)
    assert "requires --dcp-size" in str(answers["bad rule"].error)


@pytest.mark.parametrize("name", PRESETS)
def test_every_key_of_a_preset_has_a_comment(name: str) -> None:
    for line in (CONFIGS / name).read_text(encoding="utf-8").splitlines():
        if re.match(r"\s*[\w-]+:", line) and not line.rstrip().endswith(("engine:", "environment:")):
            assert re.search(r"\s# \S", line), line


def test_a_dry_run_prints_the_commands_of_all_machines_and_of_the_router(
    release: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "cuda_devices", lambda: 8)
    asked: list[str] = []

    def judge(resolved: Resolved) -> Answer:
        asked.append(resolved.served_name)
        return Answer("ValueError: no", {}) if len(asked) > 1 else Answer(None, {"page_size": 64})

    monkeypatch.setattr(dry_run, "judge", judge)
    arguments = ["--config", str(CONFIGS / "k3-throughput-decode.yaml"), "--model", str(release), "--dry-run"]
    assert main(arguments) == 0
    output = capsys.readouterr()
    for text in (
        "# engine, node 0 of 2, decode only",
        "# engine, node 1 of 2, decode only",
        "--node-rank 1",
        "--dist-init-addr 10.0.0.1:20000",
        '"engine_url": "http://10.0.0.1:8000"',
        "--mini-lb \\\n  --pd-disaggregation \\\n  --prefill http://PREFILL_HOST:PREFILL_PORT 8998",
    ):
        assert text in output.out
    assert "SGLang takes these arguments and resolves them to page_size 64" in output.err
    assert main(arguments) == 2
    assert "launch: error: SGLang refuses these arguments: ValueError: no" in capsys.readouterr().err


def test_a_prefill_engine_runs_without_a_gateway(presets: dict[str, Resolved]) -> None:
    prefill, decode = presets["k3-throughput-prefill.yaml"], presets["k3-throughput-decode.yaml"]
    assert (prefill.has_gateway, decode.has_gateway) == (False, True)
    assert "# gateway" not in dry_run.text(prefill, os.environ)
