"""Stage 4: SGLang's arguments are data, each with a reason, accepted by SGLang's own parser."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.gateway.settings import GatewaySettings
from k3_sglang.launch import command, report
from k3_sglang.launch import resolve as stage
from k3_sglang.launch.resolve import Resolved, resolve
from k3_sglang.launch.settings import SettingsError, validate


def resolved(checkpoint: Path, **values: object) -> Resolved:
    return resolve(validate({"model": str(checkpoint), "device": "cpu", **values}, source="test"))


def flags(plan: Resolved) -> dict[str, str | None]:
    return {flag.name: flag.value for flag in command.engine_flags(plan)}


def test_every_flag_has_a_reason_and_is_given_once(checkpoint: Path) -> None:
    all_flags = command.engine_flags(resolved(checkpoint, engine={"watchdog-timeout": 2}))
    assert all(flag.reason for flag in all_flags)
    assert len({flag.name for flag in all_flags}) == len(all_flags)


def test_the_sizes_reach_the_engine(checkpoint: Path) -> None:
    given = flags(resolved(checkpoint, kv_tokens=777, state_slots=5, context_len=100, page_size=4, engine_port=4321))
    assert given["max-total-tokens"] == "777"
    assert given["max-mamba-cache-size"] == "5"
    assert given["context-length"] == "100"
    assert given["page-size"] == "4"
    assert (given["host"], given["port"]) == ("127.0.0.1", "4321")


def test_the_layout_reaches_the_engine_and_every_process_gets_its_own_cores(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    plan = resolved(checkpoint, tp=2, ep=2, pp=2)
    given = flags(plan)
    assert (given["tp-size"], given["ep-size"], given["pp-size"]) == ("2", "2", "2")
    assert command.engine_environment(plan, {})["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|2|3"
    assert report.ranks(plan) == "2 rank(s) in each of 2 pipeline stages, whole experts in 2 groups"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in command.engine_environment(resolved(checkpoint), {})


@pytest.mark.parametrize("other", [{}, {"page_size": 64, "chunked_prefill_tokens": 256}, {"overlap": "on"}])
def test_the_checkpoint_cache_is_the_default_and_takes_exact_states(checkpoint: Path, other: dict[str, Any]) -> None:
    given = flags(resolved(checkpoint, **other))
    assert (given["radix-cache-backend"], given["mamba-radix-cache-strategy"]) == ("k3", "no_buffer")
    environment = command.engine_environment(resolved(checkpoint, cut_cost_tokens=77), {})
    assert environment["K3_SGLANG_CUT_COST_TOKENS"] == "77"
    assert "K3_SGLANG_CHECKPOINTS" not in environment
    stored = resolved(checkpoint, checkpoint_format="int8", checkpoint_slots=96, **other)
    assert command.engine_environment(stored, {})["K3_SGLANG_CHECKPOINTS"] == "int8:96"


def test_sglangs_own_cache_is_one_setting_away(checkpoint: Path) -> None:
    given = flags(resolved(checkpoint, cache="sglang"))
    assert "radix-cache-backend" not in given
    assert given["mamba-radix-cache-strategy"] == "extra_buffer"


def test_flags_that_the_checkpoint_cache_does_not_go_with_need_sglangs_own(checkpoint: Path) -> None:
    engine = {"speculative-algorithm": "EAGLE"}
    with pytest.raises(SettingsError, match="set cache to 'sglang' to use it"):
        flags(resolved(checkpoint, engine=engine))
    assert flags(resolved(checkpoint, engine=engine, cache="sglang"))["speculative-algorithm"] == "EAGLE"


def test_the_engine_never_listens_where_the_gateway_does(checkpoint: Path) -> None:
    assert flags(resolved(checkpoint, host="0.0.0.0"))["host"] == "127.0.0.1"


def test_a_gpu_leaves_pools_to_the_engine_and_upstream_kernels_in_place(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "cuda_devices", lambda: 8)
    plan = resolve(validate({"model": str(checkpoint), "tp": 8, "device": "cuda"}, source="test"))
    given = flags(plan)
    assert given["tp-size"] == "8"
    assert not {"max-total-tokens", "max-mamba-cache-size", "linear-attn-backend", "attention-backend"} & set(given)
    assert "CUDA_VISIBLE_DEVICES" not in command.engine_environment(plan, {})


def test_our_model_code_on_a_gpu_runs_without_what_it_was_never_run_with(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "cuda_devices", lambda: 1)
    values = {"model": str(checkpoint), "device": "cuda", "model_impl": "plugin", "experts": "fused"}
    plan = resolve(validate(values, source="test"))
    assert flags(plan)["cuda-graph-backend-prefill"] == "disabled"
    assert "disable-chunked-prefix-cache" in flags(plan)
    assert command.engine_environment(plan, {})["K3_SGLANG_EXPERTS"] == "fused"


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"trust-remote-code": True}, "no code from a checkpoint"),
        ({"page-size": 2}, "use its own setting"),
        ({"--dp-size": 2}, "without leading dashes, 'dp-size'"),
        ({"dp_size": 2}, "without leading dashes, 'dp-size'"),
        ({"ep-size": 2}, "to choose it, use its own setting"),
        ({"expert-parallel-size": 2}, "sets --ep-size itself"),
        ({"pipeline-parallel-size": 2}, "sets --pp-size itself"),
        ({"enable-metrics": False}, "leave the key out"),
        ({"disable-overlap-schedule": True}, "overlap hides CPU work behind a GPU"),
        ({"trust-remote": True}, "SGLang would read it as --trust-remote-code"),
        ({"tp": 2}, "SGLang would read it as --tp-size"),
        ({"tensor-parallel-size": 2}, "sets --tp-size itself"),
        ({"model": "elsewhere"}, "sets --model-path itself"),
        ({"config": "other.yaml"}, "is refused: a second file"),
        ({"api-key": "sk-secret"}, "keys are the gateway's, api_keys_file or api_keys_env"),
        ({"data-parallel-size": 2}, "whole copies of the model"),
        ({"nnodes": 2}, "the launcher has a setting for --nnodes; use nodes"),
        ({"nccl-init-addr": "h:1"}, "use dist_init_addr"),
        ({"attention-data-parallel-size": 2}, "use attn_dp"),
        ({"disaggregation-mode": "prefill"}, "use disaggregation"),
        ({"mem-fraction": 0.99}, "SGLang would read it as --mem-fraction-static"),
    ],
)
def test_further_flags_that_make_no_sense_are_refused(
    checkpoint: Path, engine: dict[str, object], expected: str
) -> None:
    with pytest.raises(SettingsError, match=expected):
        command.engine_flags(resolved(checkpoint, engine=engine))


def test_a_key_is_not_repeated_in_the_message_that_refuses_it(checkpoint: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        command.engine_flags(resolved(checkpoint, engine={"api-key": "sk-secret"}))
    assert "sk-secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("flag", "setting"),
    [("max-mamba-cache-size", "state_slots"), ("max-running-requests", "max_running_requests")],
)
def test_sizes_that_sglang_would_choose_on_a_gpu_are_settings_and_no_further_flags(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, flag: str, setting: str
) -> None:
    monkeypatch.setattr(stage, "cuda_devices", lambda: 1)
    plan = resolve(validate({"model": str(checkpoint), "device": "cuda", "engine": {flag: 64}}, source="test"))
    with pytest.raises(SettingsError, match=f"has a setting for --{flag}; use {setting}"):
        command.engine_flags(plan)


@pytest.mark.parametrize(
    "name", ["SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_EXTERNAL_MODEL_PACKAGE", "PATH", "K3_SGLANG_EXPERTS", "MY_KEYS"]
)
def test_variables_of_the_launcher_and_of_the_keys_are_not_the_configurations(checkpoint: Path, name: str) -> None:
    plan = resolved(checkpoint, environment={name: "sk-secret"}, api_keys_env="MY_KEYS")
    with pytest.raises(SettingsError, match=f"environment.{name}: ") as refused:
        command.engine_environment(plan, {})
    assert "sk-secret" not in str(refused.value)


def test_the_gateway_mapping_cannot_put_another_server_behind_the_gateway(checkpoint: Path) -> None:
    plan = resolved(checkpoint, gateway={"upstream": "openai", "upstream_url": "http://elsewhere/v1"})
    with pytest.raises(SettingsError, match="gateway.upstream: this gateway answers from the engine"):
        command.gateway_settings(plan)


def test_overlap_is_off_on_a_cpu_unless_asked_for(checkpoint: Path) -> None:
    assert "disable-overlap-schedule" in flags(resolved(checkpoint))
    assert "disable-overlap-schedule" not in flags(resolved(checkpoint, overlap="on"))


def test_true_gives_a_bare_flag_and_numbers_become_text(checkpoint: Path) -> None:
    given = flags(resolved(checkpoint, engine={"enable-metrics": True, "mem-fraction-static": 0.5}))
    assert given["enable-metrics"] is None
    assert given["mem-fraction-static"] == "0.5"


def test_on_a_cpu_a_gpu_is_hidden_and_hubs_are_off(checkpoint: Path) -> None:
    environment = command.engine_environment(resolved(checkpoint), {"PATH": "/bin"})
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/bin"]


def test_cpu_ranks_share_the_cores_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3, 4})
    assert command.bind_cores(2) == "0,1|2,3"
    with pytest.raises(SettingsError, match="tp x pp is 6"):
        command.bind_cores(6)


def test_the_gateway_accepts_its_settings(checkpoint: Path) -> None:
    plan = resolved(checkpoint, constrain="on", engine={"enable-deterministic-inference": True})
    settings = GatewaySettings.model_validate(command.gateway_settings(plan))
    assert settings.model == "small-k3"
    assert settings.engine_url == plan.engine_url
    assert settings.constrained_by_default
    assert settings.seeded_sampling
    assert settings.cache_hints
    assert settings.cache_routes
    assert not settings.fixed_sampling
    plain = command.gateway_settings(resolved(checkpoint, cache_hints="off", cache_routes="off", fixed_sampling="on"))
    assert (plain["cache_hints"], plain["cache_routes"], plain["fixed_sampling"]) == (False, False, True)
    assert not settings.images  # this checkpoint has no preprocessor_config.json


def test_the_gateway_learns_where_images_may_come_from_and_whether_the_engine_takes_any(
    checkpoint: Path, tmp_path: Path
) -> None:
    plan = resolved(checkpoint, allow_image_files=[str(tmp_path)], allow_image_hosts=["*.example.org"])
    settings = GatewaySettings.model_validate(command.gateway_settings(plan))
    assert settings.allow_image_files == (tmp_path,)
    assert settings.allow_image_hosts == ("*.example.org",)
    upstream = resolved(checkpoint, device="cuda", model_impl="sglang")
    assert not GatewaySettings.model_validate(command.gateway_settings(upstream)).images


def test_the_gateway_learns_what_to_keep_and_what_to_do_about_lost_thinking(checkpoint: Path, tmp_path: Path) -> None:
    settings = GatewaySettings.model_validate(command.gateway_settings(resolved(checkpoint)))
    assert (settings.guard, settings.ledger) == ("repair", None)
    plan = resolved(checkpoint, guard="strict", ledger=str(tmp_path / "ledger.db"))
    settings = GatewaySettings.model_validate(command.gateway_settings(plan))
    assert (settings.guard, settings.ledger) == ("strict", tmp_path / "ledger.db")


def test_further_settings_of_the_gateway_reach_it_and_repeat_none_of_ours(checkpoint: Path) -> None:
    plan = resolved(checkpoint, gateway={"max_running_per_key": 8})
    assert GatewaySettings.model_validate(command.gateway_settings(plan)).max_running_per_key == 8
    with pytest.raises(SettingsError, match=r"gateway\.port: the launcher sets this itself"):
        command.gateway_settings(resolved(checkpoint, gateway={"port": 1}))


def test_the_gateway_learns_where_its_keys_are_and_the_engine_does_not(checkpoint: Path) -> None:
    plan = resolved(checkpoint, host="0.0.0.0", api_keys_env="SOME_KEYS")
    settings = GatewaySettings.model_validate(command.gateway_settings(plan))
    assert (settings.api_keys_env, settings.api_keys_file, settings.allow_no_keys) == ("SOME_KEYS", None, False)
    plan = resolved(checkpoint, host="0.0.0.0", api_keys_file="/keys")
    assert GatewaySettings.model_validate(command.gateway_settings(plan)).api_keys_file == Path("/keys")
    assert GatewaySettings.model_validate(
        command.gateway_settings(resolved(checkpoint, host="0.0.0.0", allow_no_keys=True))
    ).allow_no_keys
    environment = {"SOME_KEYS": "ann:secret", "PATH": "/bin"}
    kept = command.without_keys(environment, resolved(checkpoint, api_keys_env="SOME_KEYS").settings)
    assert kept == {"PATH": "/bin"}
    assert command.without_keys(environment, resolved(checkpoint).settings) == environment


@pytest.mark.parametrize(("asked", "given"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_a_cpu_multiplies_float32_unless_told_otherwise(checkpoint: Path, asked: str, given: str) -> None:
    assert flags(resolved(checkpoint, dtype=asked))["dtype"] == given


def test_a_dry_run_prints_a_command_for_the_shell(checkpoint: Path) -> None:
    text = report.command_lines(["python", "-m", "x", "--name", "a b"], {"PATH": "/bin", "A": ""})
    assert text == "A='' PATH=/bin python -m x \\\n  --name 'a b'"
