"""The planner against sums done by hand: weights of each part, both pools, concurrency, choice of a layout."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from k3_sglang import costs, tiny
from k3_sglang.config import K3Config, TextConfig
from k3_sglang.launch.__main__ import main
from k3_sglang.launch.planner.choose import best, candidates, compare
from k3_sglang.launch.planner.hardware import GIB, find_gpu
from k3_sglang.launch.planner.layout import Layout, layout_problems, stages
from k3_sglang.launch.planner.plan import Workload, balanced_ratio, crossing_bytes, decode_bound, make_plan
from k3_sglang.launch.planner.pools import (
    Pools,
    PoolSettings,
    Shortage,
    checkpoint_pool_bytes,
    size_pools,
    slots_per_request,
)
from k3_sglang.launch.planner.release import RELEASE, RELEASE_VISION_PARAMETERS
from k3_sglang.launch.planner.weights import checkpoint_bytes, model_weights, weights_per_gpu
from k3_sglang.launch.settings import SettingsError
from k3_sglang.loading.headers import read_headers
from k3_sglang.loading.inventory import expected_tensors
from tests.launch.conftest import config_json

TEXT = RELEASE.text
EXPERT_BYTES = 3 * 3072 * 3584 * 17 // 32  # 4 bits a value, one byte of scale for 32
ROUTED_BYTES = 92 * 896 * EXPERT_BYTES
LATENT_BYTES = 92 * (2 * 3584 * 7168 + 3584) * 2
SHARED_BYTES = 92 * 3 * 7168 * 6144 * 2


def test_the_release_weighs_what_its_files_do() -> None:
    assert ROUTED_BYTES == 1_446_456_066_048
    assert RELEASE_VISION_PARAMETERS == 447_358_976
    assert checkpoint_bytes(TEXT, RELEASE.vision_bytes) == pytest.approx(1.5608e12, rel=1e-3)
    plain = sum(weight.bytes for weight in model_weights(replace(TEXT, experts_packed=False)))
    assert plain == pytest.approx(2 * costs.total_parameters(TEXT), rel=1e-5)


def test_eight_ranks_split_experts_and_heads_and_hold_the_latent_projections_whole() -> None:
    held = weights_per_gpu(TEXT, Layout(tp=8), vision_bytes=RELEASE.vision_bytes)
    assert held.parts["routed experts"] == pytest.approx(ROUTED_BYTES / 8, rel=1e-6)
    assert held.parts["latent projections"] == LATENT_BYTES
    assert held.parts["router"] == 92 * 896 * (7168 * 2 + 4)
    assert held.parts["shared experts"] == pytest.approx(SHARED_BYTES / 8, rel=1e-6)
    assert held.parts["vision"] == 2 * 447_358_976
    assert held.bytes / GIB == pytest.approx(191.8, abs=0.1)  # not 1,561 / 8 = 195 GB = 181.7 GiB


def test_an_expert_transport_makes_every_rank_hold_the_shared_experts() -> None:
    alone = weights_per_gpu(TEXT, Layout(tp=16, ep=16, attn_dp=2, transport="megamoe"))
    assert alone.parts["shared experts"] == SHARED_BYTES
    assert alone.parts["routed experts"] == pytest.approx(ROUTED_BYTES / 16, rel=1e-6)
    more = weights_per_gpu(TEXT, Layout(tp=16, ep=16, transport="megamoe", redundant_experts=112))
    assert more.parts["routed experts"] == pytest.approx(ROUTED_BYTES / 16 * 9 / 8, rel=1e-6)


def test_a_stage_holds_its_layers_and_the_fullest_counts() -> None:
    assert [len(stage) for stage in stages(93, 8)] == [11, 11, 11, 12, 12, 12, 12, 12]
    held = weights_per_gpu(TEXT, Layout(pp=8), vision_bytes=RELEASE.vision_bytes)
    assert held.stage == 7  # twelve layers and the head
    assert held.parts["routed experts"] == 12 * 896 * EXPERT_BYTES
    assert "vision" not in held.parts


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(tp=64), "tp / attn_dp is 64; it must divide the 96 KDA heads"),
        (Layout(tp=8, ep=3), "ep is 3; it must divide tp, 8"),
        (Layout(tp=8, attn_dp=3), "attn_dp is 3; it must divide tp, 8"),
        (Layout(tp=8, attn_dp=2, dcp=8), "dcp is 8; it must divide tp / attn_dp, 4"),
        (Layout(tp=8, nodes=3), "nodes is 3; it must divide tp x pp, 8"),
        (Layout(pp=94), "pp is 94; the model has 93 layers"),
    ],
)
def test_layouts_that_do_not_come_out_even_are_refused(layout: Layout, expected: str) -> None:
    assert any(problem.startswith(expected) for problem in layout_problems(layout, TEXT))
    assert layout_problems(Layout(tp=96, ep=32, nodes=24), TEXT) == []


def small() -> TextConfig:
    """Three KDA layers of 8 heads of 16, one MLA layer with latents of 32 + 16."""
    return K3Config.from_dict(config_json()).text


def test_pools_are_split_as_sglang_splits_them() -> None:
    """By hand: a slot has 3 x (8·16·16·4 + 3·384·2) = 31,488 bytes, a token 48·2 = 96."""
    settings = PoolSettings(context_len=4096, max_running_requests=8, page_size=64)
    rest = 10_000_000
    pools = size_pools(small(), Layout(), settings, rest)
    assert isinstance(pools, Pools)
    assert (pools.bytes_per_slot, pools.bytes_per_token, pools.slots_per_request) == (31_488, 96, 3)
    slots = int((rest * 0.9 / 1.9 - 31_488) // 31_488)
    assert pools.state_slots == slots == 149
    assert pools.kv_tokens == (rest - 150 * 31_488) // 96 // 64 * 64 == 54_912
    assert pools.max_running_requests == 8
    alone = size_pools(small(), Layout(), replace(settings, max_running_requests=None, state_slots=30), rest)
    assert isinstance(alone, Pools)
    assert (alone.state_slots, alone.max_running_requests) == (30, 10)
    assert alone.kv_tokens == (rest - 31 * 31_488) // 96 // 64 * 64


def test_drafts_take_states_of_every_verified_position_unless_they_are_replayed() -> None:
    settings = PoolSettings(context_len=4096, max_running_requests=2, draft_tokens=8, state_slots=30)
    kept = size_pools(small(), Layout(), settings, 10_000_000)
    replayed = size_pools(small(), Layout(), replace(settings, replay_states=True), 10_000_000)
    assert isinstance(kept, Pools) and isinstance(replayed, Pools)
    assert kept.draft_state_bytes == (2 + 1) * 8 * 31_488
    assert replayed.draft_state_bytes == 0
    # The ring: raw v and k, beta, decay, d, k, for 16 positions of 8 heads of 16 in 3 layers.
    ring = 3 * (4 * 8 * 16 * 16 * 2 + 8 * 16 * 4 + 8 * 16 * 16 * 4)
    assert replayed.bytes_per_slot == 31_488 + ring


@pytest.mark.parametrize(
    ("changes", "layout", "expected"),
    [
        ({}, Layout(), 3),
        ({"strategy": "extra_buffer"}, Layout(), 5),
        ({"strategy": "extra_buffer"}, Layout(pp=2), 4),
        ({"strategy": "extra_buffer", "overlap": False}, Layout(), 4),
        ({"strategy": "extra_buffer_lazy"}, Layout(), 4),
        ({"role": "decode"}, Layout(), 1),
        ({"prefix_cache": False}, Layout(), 1),
    ],
)
def test_slots_of_a_running_request(changes: dict[str, Any], layout: Layout, expected: int) -> None:
    settings = replace(PoolSettings(context_len=4096), **changes)
    assert slots_per_request(settings, layout) == expected


def test_what_does_not_fit_says_by_how_much() -> None:
    eight = make_plan(RELEASE, find_gpu("h200"), Layout(tp=8, ep=8), PoolSettings(context_len=8192), Workload())
    assert not eight.fits
    assert eight.shortage is not None
    assert eight.shortage.missing_bytes / GIB == pytest.approx(67.7, abs=0.1)
    tight = size_pools(small(), Layout(), PoolSettings(context_len=4096, state_slots=350), 10_000_000)
    assert isinstance(tight, Shortage)
    assert tight.missing_bytes == 351 * 31_488 + 96 - 10_000_000


def test_concurrency_is_what_both_pools_carry() -> None:
    settings = PoolSettings(context_len=1 << 20, memory_fraction=0.85, page_size=64, state_ratio=0.5)
    plan = make_plan(RELEASE, find_gpu("b300"), Layout(tp=8), settings, Workload(context=65_536))
    assert plan.pools is not None
    here = plan.at_workload
    assert here is not None
    assert here.by_latents == plan.pools.kv_tokens // 65_536
    assert here.by_states == plan.pools.state_slots // 3
    assert here.running == min(here.by_latents, here.by_states)
    shared = make_plan(RELEASE, find_gpu("b300"), Layout(tp=8, dcp=8), settings, Workload(context=65_536))
    assert shared.at_workload is not None
    assert shared.at_workload.by_latents == pytest.approx(8 * here.by_latents, rel=0.1)
    assert [row.context for row in plan.rows] == [1024 * size for size in (8, 16, 32, 64, 128, 256, 512, 1024)]


def test_the_balanced_share_makes_both_pools_run_out_together() -> None:
    layout, settings = Layout(tp=8), PoolSettings(context_len=1 << 20)
    asked = Workload(context=100_000, concurrent=30, sessions=60)
    ratio = balanced_ratio(TEXT, layout, settings, asked)
    assert ratio == round(120 * 56_171_520 / (60 * 100_000 * 27_648), 3)
    gpu = find_gpu("b300", memory_gib=500)
    plan = make_plan(RELEASE, gpu, layout, replace(settings, state_ratio=ratio), asked)
    assert plan.pools is not None
    assert plan.pools.state_slots / 120 == pytest.approx(plan.pools.kv_tokens / 6_000_000, rel=0.02)
    assert plan.meets


def test_a_decode_step_reads_at_least_its_weights_states_and_latents() -> None:
    plan = make_plan(RELEASE, find_gpu("b300"), Layout(tp=8), PoolSettings(context_len=1 << 20), Workload())
    one = decode_bound(plan, 100_000, 1)
    assert one.expert_bytes == pytest.approx(ROUTED_BYTES / 8 * 16 / 896, rel=1e-6)
    assert one.state_bytes == 2 * 56_171_520
    assert one.latent_bytes == 100_000 * 27_648
    many = decode_bound(plan, 100_000, 64)
    assert many.expert_bytes == pytest.approx(ROUTED_BYTES / 8 * (1 - (1 - 16 / 896) ** 64), rel=1e-6)


def test_a_group_over_a_network_says_what_it_sends_and_one_inside_nvlink_sends_nothing() -> None:
    settings = PoolSettings(context_len=1 << 20)
    over = make_plan(RELEASE, find_gpu("h200"), Layout(tp=16, ep=16, nodes=2), settings, Workload())
    assert crossing_bytes(over) == int(2 * 15 / 16 * 2 * 93 * 7168 * 2)
    inside = make_plan(RELEASE, find_gpu("gb300"), Layout(tp=8, nodes=2), settings, Workload())
    assert crossing_bytes(inside) == 0
    assert candidates(find_gpu("gb300"), 8, 2, RELEASE) == [Layout(tp=8, nodes=2), Layout(pp=8, nodes=2)]


def test_the_layout_that_serves_the_workload_is_chosen() -> None:
    gpu, asked = find_gpu("h200"), Workload(context=32_768, concurrent=16, sessions=32)
    layouts = candidates(gpu, 16, 2, RELEASE)
    assert Layout(tp=16, ep=16, nodes=2) in layouts
    settings = PoolSettings(context_len=262_144)
    chosen = best(compare(RELEASE, gpu, layouts, settings, asked, balance=True, overhead_gib=2.0))
    assert chosen.fits and chosen.layout.pp <= 2
    nothing = best(compare(RELEASE, gpu, [Layout(tp=8, ep=8)], settings, asked, balance=True, overhead_gib=2.0))
    assert not nothing.fits


def test_the_command_prints_tables_and_json_and_says_by_its_code_what_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--gpu", "b300", "--context", "65536", "--concurrent", "8", "--sessions", "16"]) == 0
    shown = capsys.readouterr().out
    for text in ("routed experts", "latents", "states", "1024K", "nothing of this was run on a GPU", "tp: 8"):
        assert text in shown
    assert main(["plan", "--gpu", "h200", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is False
    assert told["shortage"]["missing_bytes"] > 60 * GIB
    assert main(["plan", "--gpu", "b299"]) == 2
    assert "gpu is 'b299'; known kinds: h100" in capsys.readouterr().err


def test_the_host_tier_is_told_in_host_memory(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(repository / "configs" / "k3-agents.yaml"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    tier = 2 * (told["pools"]["kv_bytes"] + told["pools"]["state_bytes"]) * 8 / GIB
    assert f"the host tier takes up to {tier:.1f} GiB of memory on each machine" in told["notes"]


def test_another_model_is_planned_from_its_configuration(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--gpu", "h100", "--gpus", "1", "--model", str(checkpoint), "--context", "1024", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["model"]["name"] == "small-k3"


def test_an_amount_of_memory_that_is_none_is_refused() -> None:
    with pytest.raises(SettingsError, match="gpu_memory_gib is 0"):
        find_gpu("b300", 0)


def test_the_tiny_models_files_weigh_what_is_planned() -> None:
    directory = tiny.ensure()
    config = K3Config.from_dir(directory)
    stored = sum(tensor.size_bytes for tensor in read_headers(directory).values())
    images = {name: spec for name, spec in expected_tensors(config).items() if "language_model" not in name}
    vision = sum(2 * prod(spec.shape) for spec in images.values())
    assert checkpoint_bytes(config.text, vision) == pytest.approx(stored, rel=1e-3)


def test_a_pool_of_checkpoints_is_counted_in_what_the_memory_fraction_keeps_back() -> None:
    layout, workload = Layout(tp=8), Workload()
    plain = PoolSettings(262_144, memory_fraction=0.85, state_ratio=0.1, page_size=64, chunked_prefill_tokens=16_384)
    small = replace(plain, checkpoint_format="int8", checkpoint_slots=200)
    assert checkpoint_pool_bytes(TEXT, small, layout) == 201 * 69 * (12 * 128 * 132 + 3 * 36_864 // 8 * 2)
    halves = replace(small, checkpoint_format="bfloat16")
    assert checkpoint_pool_bytes(TEXT, halves, layout) == 201 * 232_316_928 // 8
    gpu = find_gpu("b300")
    plan = make_plan(RELEASE, gpu, layout, small, workload)
    assert plan.fits and plan.rows[0].sessions == 100
    tight = make_plan(RELEASE, gpu, layout, replace(small, memory_fraction=0.9), workload)
    assert not tight.fits and tight.shortage is not None
    assert "checkpoint_slots take" in tight.shortage.why and "set it to 0.89" in tight.shortage.why


def test_requests_that_the_latents_cannot_hold_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "long.yaml"
    engine = "engine: {moe-runner-backend: marlin, mem-fraction-static: 0.9, mamba-full-memory-ratio: 0.031}"
    text = f"gpu: h200\ntp: 16\nep: 16\nnodes: 2\ndist_init_addr: h:1\npage_size: 64\n{engine}\n"
    file.write_text(text, encoding="utf-8")
    assert main(["plan", "--config", str(file)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "context_len is 1048576 (the model's, where it is not set)" in shown and "at most 862336 tokens" in shown
    file.write_text(text + "context_len: 862336\n", encoding="utf-8")
    assert main(["plan", "--config", str(file)]) == 0


def test_settings_of_a_plan_give_that_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--gpu", "h200", "--gpus", "16", "--kv-dtype", "fp8", "--cache", "sglang", "--state-slots", "60"]
    main(["plan", *given, "--concurrent", "8", "--state-dtype", "bfloat16", "--kv-tokens", "400000", "--json"])
    told = json.loads(capsys.readouterr().out)
    lines: list[str] = []
    engine = {"moe-runner-backend": "marlin"}
    for name, value in told["settings"].items():
        if name.startswith("engine."):
            engine[name.removeprefix("engine.")] = value
        else:
            lines.append(f"{name}: {value}")
    file = tmp_path / "planned.yaml"
    file.write_text("\n".join([*lines, f"engine: {json.dumps(engine)}", "dist_init_addr: h:1"]), encoding="utf-8")
    assert main(["plan", "--config", str(file), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["pools"] | {"max_running_requests": 0} == told["pools"] | {"max_running_requests": 0}
    assert again["rest_bytes"] == told["rest_bytes"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "configs/k3-8xb300.yaml", "--tp", "16"], "--tp beside --config"),
        (["--config", "configs/k3-8xb300.yaml", "--kv-dtype", "fp8"], "--kv-dtype beside --config"),
        (["--gpu", "b300", "--gpus", "0"], "it must be above 0"),
        (["--gpu", "b300", "--context", "-1"], "it must be above 0"),
        (["--gpu", "b300", "--memory-fraction", "nan"], "it must be above 0"),
    ],
)
def test_nothing_that_is_asked_of_a_plan_is_ignored(
    repository: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    words = [str(repository / word) if word.startswith("configs/") else word for word in arguments]
    assert main(["plan", *words]) == 2
    assert expected in capsys.readouterr().err


def test_the_chosen_layout_is_marked_and_a_model_that_is_not_here_is_named(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--gpu", "b200", "--gpus", "16", "--context", "65536", "--concurrent", "8"]) in (0, 1)
    assert " <" in capsys.readouterr().out.split("memory of")[0]
    assert main(["plan", "--config", str(repository / "configs" / "k3-8xb300.yaml")]) == 0
    assert "(/path/to/Kimi-K3 is not here)" in capsys.readouterr().out
    assert main(["plan", "--config", str(repository / "configs" / "tiny.yaml"), "--gpu", "b300", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["model"]["checkpoint_bytes"] < 10_000_000
