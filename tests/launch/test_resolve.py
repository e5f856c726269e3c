"""Stage 2: what is left open is decided, what cannot be served is refused in one line."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from k3_sglang import tiny
from k3_sglang.launch import resolve as stage
from k3_sglang.launch.resolve import CPU_KV_TOKENS, CPU_STATE_SLOTS, Resolved, resolve
from k3_sglang.launch.settings import SettingsError, validate

MAX_CONTEXT_LEN = 4096


def resolved(checkpoint: Path, **values: object) -> Resolved:
    return resolve(validate({"model": str(checkpoint), "device": "cpu", **values}, source="test"))


def refusal(checkpoint: Path | str, **values: object) -> str:
    with pytest.raises(SettingsError) as caught:
        resolve(validate({"model": str(checkpoint), "device": "cpu", **values}, source="test"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_on_a_cpu_every_size_has_a_number(checkpoint: Path) -> None:
    plan = resolved(checkpoint)
    assert plan.context_len == MAX_CONTEXT_LEN
    assert (plan.kv_tokens, plan.state_slots, plan.page_size) == (CPU_KV_TOKENS, CPU_STATE_SLOTS, 1)
    assert plan.max_running_requests and plan.chunked_prefill_tokens
    assert plan.served_name == "small-k3"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"experts": "fused"}, "experts is 'fused'; on device cpu use auto, packed or unpacked"),
        ({"experts": "packed", "device": "cuda", "model_impl": "plugin"}, "on device cuda use auto or fused"),
        ({"experts": "fused", "device": "cuda"}, "leave it at auto or set model_impl to plugin"),
    ],
)
def test_a_way_of_keeping_experts_that_the_device_lacks_is_refused(
    checkpoint: Path, values: dict[str, object], expected: str
) -> None:
    assert expected in refusal(checkpoint, **values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"checkpoint_slots": 9}, "checkpoint_slots is 9, but checkpoints lie among state_slots"),
        ({"checkpoint_format": "int8", "checkpoint_slots": 9}, "only the k3 cache stores states so"),
        ({"checkpoint_format": "int8", "cache": "k3"}, "say with checkpoint_slots how many"),
    ],
)
def test_a_format_of_checkpoints_comes_with_the_k3_cache_and_a_size(
    checkpoint: Path, values: dict[str, object], expected: str
) -> None:
    assert expected in refusal(checkpoint, **{"cache": "sglang", **values})


def test_given_sizes_are_kept(checkpoint: Path) -> None:
    plan = resolved(checkpoint, kv_tokens=777, state_slots=5, context_len=100, served_name="k3")
    assert (plan.kv_tokens, plan.state_slots, plan.context_len, plan.served_name) == (777, 5, 100, "k3")


def test_a_context_longer_than_the_models_is_refused_with_both_numbers(checkpoint: Path) -> None:
    assert refusal(checkpoint, context_len=4097) == (
        "context_len is 4097; this model's maximum is 4096: ask for at most that"
    )
    assert resolved(checkpoint, context_len=4096).context_len == 4096


def test_a_context_that_the_kv_pool_cannot_hold_is_refused_and_never_the_default(checkpoint: Path) -> None:
    message = refusal(checkpoint, context_len=900, kv_tokens=800)
    assert "context_len is 900, but a request in this KV pool has room for 798 tokens" in message
    assert resolved(checkpoint, kv_tokens=800).context_len == 798
    assert resolved(checkpoint, kv_tokens=800, page_size=64).context_len == 12 * 64 - 2 * 64


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"page_size": 64, "chunked_prefill_tokens": 100}, "chunked_prefill_tokens is 100; it must be a multiple of"),
        ({"page_size": 64, "kv_tokens": 191}, "kv_tokens is 191; it must be at least three pages, 192"),
        ({"state_slots": 3}, "state_slots is 3; one running request alone takes up to 4"),
        ({"state_slots": 4, "cache": "sglang", "overlap": "on"}, "one running request alone takes up to 5"),
        ({"pp": 5}, "pp is 5; the model has 4 layers: ask for at most that"),
        ({"port": 4000, "engine_port": 4000}, "port and engine_port are both 4000"),
    ],
)
def test_sizes_and_ports_that_exclude_each_other_are_refused(
    checkpoint: Path, values: dict[str, object], expected: str
) -> None:
    assert expected in refusal(checkpoint, **values)


@pytest.mark.parametrize(
    ("tp", "ep", "expected"),
    [
        (2, 4, "ep is 4; it must divide tp, 2: with tp 2 choose one of 1, 2"),
        (6, 6, "ep is 6; it must divide the model's 8 experts: with tp 6 choose one of 1, 2"),
    ],
)
def test_expert_groups_that_do_not_come_out_even_are_refused(checkpoint: Path, tp: int, ep: int, expected: str) -> None:
    assert expected in refusal(checkpoint, tp=tp, ep=ep)
    assert resolved(checkpoint, tp=2, ep=2).settings.ep == 2


def test_two_free_ports_are_never_the_same(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = iter([5001, 5001, 5002])
    monkeypatch.setattr(stage, "bind_once", lambda host, port: next(offered))
    plan = resolved(checkpoint, port=0)
    assert (plan.gateway_port, plan.engine_port) == (5001, 5002)


def test_a_missing_model_directory_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nowhere")
    assert "no such directory" in message
    assert "or `tiny`" in message


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    assert "must contain config.json" in refusal(tmp_path)


def test_another_architecture_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}), encoding="utf-8")
    assert "'LlamaForCausalLM'" in refusal(checkpoint)


def test_weights_of_a_directory_are_taken_as_trained(checkpoint: Path) -> None:
    assert not resolved(checkpoint).constrain
    assert resolved(checkpoint, constrain="on").constrain


def test_a_free_port_is_picked_for_zero(checkpoint: Path) -> None:
    plan = resolved(checkpoint, port=0)
    assert plan.gateway_port > 0
    assert plan.engine_port > 0
    assert plan.gateway_url == f"http://127.0.0.1:{plan.gateway_port}"


def test_the_url_for_clients_here_never_names_the_wildcard_address(checkpoint: Path) -> None:
    assert resolved(checkpoint, host="0.0.0.0", port=4000).gateway_url == "http://127.0.0.1:4000"
    assert resolved(checkpoint, host="::1", port=4000).gateway_url == "http://[::1]:4000"


def test_a_host_that_is_not_ours_is_refused(checkpoint: Path) -> None:
    assert "host is '192.0.2.1'" in refusal(checkpoint, host="192.0.2.1", port=0)


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (2, "cuda")])
def test_auto_takes_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch, gpus: int, device: str) -> None:
    monkeypatch.setattr(stage, "cuda_devices", lambda: gpus)
    assert stage.resolve_device("auto") == device
    assert stage.resolve_device("cpu") == "cpu"


def test_on_a_gpu_the_engine_decides_what_is_not_given(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "cuda_devices", lambda: 8)
    plan = resolve(validate({"model": str(checkpoint), "tp": 8}, source="test"))
    assert plan.device == "cuda"
    assert (plan.kv_tokens, plan.state_slots, plan.page_size, plan.max_running_requests) == (None,) * 4
    assert not plan.own_model


def test_images_are_served_by_our_model_from_a_checkpoint_that_has_everything_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.build(tmp_path / "tiny")
    assert resolved(directory).why_text_only is None
    monkeypatch.setattr(stage, "cuda_devices", lambda: 8)
    upstream = resolve(validate({"model": str(directory)}, source="test"))
    assert "code from the checkpoint, which is never run" in str(upstream.why_text_only)
    (directory / "preprocessor_config.json").write_text('{"media_proc_cfg": {}}', encoding="utf-8")
    assert "cannot be served: media_proc_cfg.merge_kernel_size is missing" in refusal(directory)
    (directory / "preprocessor_config.json").unlink()
    assert "has no preprocessor_config.json" in str(resolved(directory).why_text_only)


def test_the_upstream_model_is_refused_on_a_cpu(checkpoint: Path) -> None:
    assert "needs a GPU" in refusal(checkpoint, model_impl="sglang")


def test_binding_a_port_that_is_served_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            stage.bind_once("127.0.0.1", port)
    assert stage.bind_once("127.0.0.1", port) == port
