"""Deployments on several machines and in two roles: places that there are not, flags that reach the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k3_sglang.launch import command, report
from k3_sglang.launch import resolve as stage
from k3_sglang.launch.resolve import Resolved, resolve
from k3_sglang.launch.settings import SettingsError, validate

TWO = {"nodes": 2, "dist_init_addr": "10.0.0.1:20000", "tp": 8}
DECODE = {"disaggregation": "decode", "router_url": "http://10.0.0.1:8000", "cache": "sglang"}


def resolved(checkpoint: Path, **values: Any) -> Resolved:
    return resolve(validate({"model": str(checkpoint), "device": "cuda", **values}, source="test"))


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "cuda_devices", lambda: 8)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({**TWO, "node_rank": 2}, "node_rank is 2; with nodes 2 it must be from 0 to 1"),
        ({"nodes": 2, "tp": 8}, "nodes is 2, but dist_init_addr is not set; give HOST:PORT"),
        ({"dist_init_addr": "a:1"}, "dist_init_addr is 'a:1', but nodes is 1"),
        ({**TWO, "dist_init_addr": "10.0.0.1"}, "dist_init_addr is '10.0.0.1'; it must be HOST:PORT"),
        ({**TWO, "dist_init_addr": "10.0.0.1:http"}, "it must be HOST:PORT"),
        ({"disaggregation": "decode"}, "disaggregation is 'decode', but router_url is not set"),
        ({"router_url": "10.0.0.1:8000"}, "router_url is '10.0.0.1:8000'; it must be the URL"),
        ({"disaggregation": "prefill", "router_url": "http://a:1"}, "which runs no gateway"),
        ({"tp": 8, "attn_dp": 3}, "attn_dp is 3; it must divide tp, 8"),
        ({"tp": 8, "attn_dp": 2, "dcp": 8}, "dcp is 8; it must divide tp / attn_dp, 4"),
        ({**TWO, "nodes": 3}, "nodes is 3; it must divide tp x pp, 8"),
        ({"tp": 16}, "tp / attn_dp is 16; it must divide the 8 KDA heads: 1, 2, 4, 8"),
    ],
)
def test_a_place_that_there_is_not_is_refused(checkpoint: Path, values: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingsError) as refused:
        resolved(checkpoint, **values)
    assert expected in str(refused.value)


def test_each_machine_gets_its_rank_and_only_the_first_the_gateway(checkpoint: Path) -> None:
    first, second = (resolved(checkpoint, **TWO, node_rank=rank) for rank in range(2))
    assert (first.has_gateway, second.has_gateway) == (True, False)
    assert (first.processes, first.processes_here) == (8, 4)
    given = {flag.name: flag.value for flag in command.engine_flags(second)}
    assert (given["nnodes"], given["node-rank"], given["dist-init-addr"]) == ("2", "1", "10.0.0.1:20000")
    assert report.place(second) == " node=1/2"
    alone = {flag.name for flag in command.engine_flags(resolved(checkpoint, tp=8))}
    assert not alone & {"nnodes", "node-rank", "dist-init-addr", "disaggregation-mode", "dcp-size", "attn-dp-size"}


def test_the_gateway_of_a_decode_engine_sends_to_the_router(checkpoint: Path) -> None:
    plan = resolved(checkpoint, **DECODE, engine_host="0.0.0.0", engine_port=30100)
    assert command.gateway_settings(plan)["engine_url"] == "http://10.0.0.1:8000"
    given = {flag.name: flag.value for flag in command.engine_flags(plan)}
    assert (given["disaggregation-mode"], given["host"]) == ("decode", "0.0.0.0")
    assert plan.engine_url == "http://127.0.0.1:30100"


def test_further_variables_reach_the_engine_unless_they_are_the_launchers(checkpoint: Path) -> None:
    plan = resolved(checkpoint, environment={"NCCL_CUMEM_ENABLE": "1"})
    assert command.engine_environment(plan, {})["NCCL_CUMEM_ENABLE"] == "1"
    for name in ("SGLANG_PLUGINS", "K3_SGLANG_MODEL_IMPL", "PATH", "K3_SGLANG_ANYTHING"):
        with pytest.raises(SettingsError, match=f"environment.{name}: the launcher decides"):
            command.engine_environment(resolved(checkpoint, environment={name: "x"}), {})


def test_a_variable_that_is_no_text_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"environment.A is 1; it must be text \(write numbers in quotes\)"):
        validate({"environment": {"A": 1}}, source="test")
