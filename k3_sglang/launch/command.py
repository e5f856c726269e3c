"""Stage 4: the exact programs to run, as data: SGLang's flags with a reason each, environments, gateway settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_sglang.announce import DIRECTORY_VARIABLE
from k3_sglang.launch.engine_mapping import check_variable, further_flag
from k3_sglang.launch.resolve import Resolved
from k3_sglang.launch.settings import LaunchSettings, SettingsError


@dataclass(frozen=True)
class Flag:
    """One SGLang argument; ``value`` None is a bare flag."""

    name: str
    value: str | None
    reason: str


def engine_flags(resolved: Resolved) -> list[Flag]:
    """SGLang's arguments, ours first, then those of the ``engine`` mapping.

    Raises:
        SettingsError: the mapping repeats one of ours, or asks for a forbidden one.
    """
    ours = _common_flags(resolved) + _deployment_flags(resolved) + _pool_flags(resolved) + _cache_flags(resolved)
    if resolved.device == "cpu":
        ours += _cpu_flags()
    elif resolved.own_model:
        ours += _own_model_on_gpu_flags()
    if not resolved.overlap:
        ours.append(Flag("disable-overlap-schedule", None, "overlap hides CPU work behind a GPU"))
    taken = {flag.name: flag.reason for flag in ours}
    cache, mapping = resolved.settings.cache, resolved.settings.engine
    reason = "engine mapping of the configuration"
    return ours + [Flag(name, further_flag(name, value, taken, cache), reason) for name, value in mapping.items()]


def _common_flags(resolved: Resolved) -> list[Flag]:
    settings = resolved.settings
    return [
        Flag("model-path", str(resolved.model_dir), "the checkpoint"),
        Flag(
            "served-model-name",
            resolved.served_name,
            "the same name in the engine's logs and the gateway's answers",
        ),
        Flag("host", settings.engine_host, "only the gateway, or a router, talks to the engine"),
        Flag("port", str(resolved.engine_port), "chosen by the launcher, told to the gateway"),
        Flag("device", resolved.device, "decided once, here"),
        Flag("tp-size", str(settings.tp), "tensor-parallel ranks"),
        Flag("pp-size", str(settings.pp), "pipeline stages of as many ranks each"),
        Flag("ep-size", str(settings.ep), "expert-parallel groups inside the tensor-parallel ranks"),
        Flag("dtype", resolved.dtype, "type of weights and activations"),
        Flag("context-length", str(resolved.context_len), "requests beyond it are refused, not truncated"),
        Flag("log-level", settings.log_level, "same as the gateway's"),
        Flag(
            "log-level-http",
            "warning",
            "the gateway logs requests; the engine's access log would repeat them",
        ),
        Flag("stream-interval", "1", "every token is sent on at once"),
        Flag(
            "incremental-streaming-output",
            None,
            "chunks carry new ids only; cumulative ones grow quadratically",
        ),
        Flag("grammar-backend", "xgrammar", "tool calls and response formats are structural tags"),
    ]


def _deployment_flags(resolved: Resolved) -> list[Flag]:
    settings = resolved.settings
    flags: list[Flag] = []
    if settings.attn_dp > 1:
        flags.append(Flag("attn-dp-size", str(settings.attn_dp), "groups that serve different requests"))
    if settings.dcp > 1:
        flags.append(Flag("dcp-size", str(settings.dcp), "ranks that share the latents of a request"))
    if settings.nodes > 1:
        flags += [
            Flag("nnodes", str(settings.nodes), "machines"),
            Flag("node-rank", str(settings.node_rank), "which of them this is"),
            Flag("dist-init-addr", settings.dist_init_addr, "where they meet"),
        ]
    if settings.disaggregation != "none":
        flags.append(Flag("disaggregation-mode", settings.disaggregation, "one of two roles behind a router"))
    return flags


def _pool_flags(resolved: Resolved) -> list[Flag]:
    sizes = [
        ("max-running-requests", resolved.max_running_requests, "requests decoded together"),
        ("max-total-tokens", resolved.kv_tokens, "KV pool in tokens"),
        ("max-mamba-cache-size", resolved.state_slots, "recurrent-state pool in slots"),
        ("page-size", resolved.page_size, "tokens per KV page"),
        ("chunked-prefill-size", resolved.chunked_prefill_tokens, "most tokens in one prefill step"),
    ]
    return [Flag(name, str(value), reason) for name, value, reason in sizes if value is not None]


def _cache_flags(resolved: Resolved) -> list[Flag]:
    if resolved.settings.cache == "k3":
        return [
            Flag("radix-cache-backend", "k3", "checkpoints are kept by value"),
            Flag("mamba-radix-cache-strategy", "no_buffer", "states at ends of chunks and turns, no spare slots"),
        ]
    return [
        Flag(
            "mamba-radix-cache-strategy",
            "extra_buffer",
            "auto may fall back to no_buffer, which keeps states only at request ends",
        ),
    ]


def _cpu_flags() -> list[Flag]:
    return [
        Flag("attention-backend", "k3_cpu", "the plugin's; SGLang would take torch_native, which recomputes prefixes"),
        Flag("linear-attn-backend", "triton", "the name under which the plugin's KDA backend takes over"),
        Flag("cuda-graph-backend-decode", "disabled", "there is no CUDA"),
        Flag("cuda-graph-backend-prefill", "disabled", "there is no CUDA"),
        Flag("sleep-on-idle", None, "an idle engine would ask for work in a loop and keep a core busy"),
    ]


def _own_model_on_gpu_flags() -> list[Flag]:
    return [
        Flag("cuda-graph-backend-prefill", "disabled", "our model code was never run under captured prefills"),
        Flag("disable-chunked-prefix-cache", None, "our MLA layer attends to cached tokens in one piece"),
    ]


def engine_command(resolved: Resolved) -> list[str]:
    """The engine's command line."""
    command = [sys.executable, "-m", "sglang.launch_server"]
    for flag in engine_flags(resolved):
        command += [f"--{flag.name}"] if flag.value is None else [f"--{flag.name}", flag.value]
    return command


def engine_environment(resolved: Resolved, base: Mapping[str, str]) -> dict[str, str]:
    """Variables of the engine that differ from ``base`` or must be there.

    Raises:
        SettingsError: a variable that is not the configuration's to set; more CPU ranks than cores.
    """
    added = {
        "K3_SGLANG_MODEL_IMPL": resolved.settings.model_impl,
        "K3_SGLANG_EXPERTS": resolved.settings.experts,
        # The checkpoint is a local folder: a lookup on a hub can only hang or fetch something else.
        "HF_HUB_OFFLINE": "1",
        # Programs installed beside this Python (ninja, for kernels compiled at first use) are found first.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", os.defpath)]),
    }
    if resolved.settings.cache == "k3":
        added["K3_SGLANG_CUT_COST_TOKENS"] = str(resolved.cut_cost_tokens)
        if resolved.settings.checkpoint_format != "state":
            form, slots = resolved.settings.checkpoint_format, resolved.settings.checkpoint_slots
            added["K3_SGLANG_CHECKPOINTS"] = f"{form}:{slots}"
    if resolved.own_model:
        # SGLang then registers our classes itself and skips importing its own two hundred models.
        added["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "k3_sglang.models"
    for name, value in resolved.settings.environment.items():
        check_variable(name, added, resolved.settings.api_keys_env)
        added[name] = value
    if resolved.device == "cpu":
        added["CUDA_VISIBLE_DEVICES"] = ""  # else the plugin would leave the platform to a GPU that is there
        # A dozen warnings that this or that kernel wants a GPU; PYTHONWARNINGS in the user's shell wins.
        added["PYTHONWARNINGS"] = base.get("PYTHONWARNINGS", "ignore::UserWarning")
        if resolved.processes > 1:
            added["SGLANG_CPU_OMP_THREADS_BIND"] = bind_cores(resolved.processes)
    return added


def bind_cores(ranks: int) -> str:
    """Cores per rank, ``0,1|2,3``: without it SGLang allows one rank per NUMA node only.

    Raises:
        SettingsError: more ranks than usable cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // ranks
    if share == 0:
        raise SettingsError(f"tp x pp is {ranks} on device cpu, but only {len(cores)} core(s) are usable: lower them")
    return "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(ranks))


def with_announcements(environment: Mapping[str, str], directory: Path) -> dict[str, str]:
    """The engine's environment plus the folder its processes announce themselves in."""
    return {**environment, DIRECTORY_VARIABLE: str(directory)}


def gateway_settings(resolved: Resolved) -> dict[str, Any]:
    """Contents of the gateway's settings file.

    Raises:
        SettingsError: the ``gateway`` mapping repeats a key that the launcher sets, or names another server.
    """
    ours = _gateway_settings(resolved)
    for name in resolved.settings.gateway:
        if name in ours:
            raise SettingsError(f"gateway.{name}: the launcher sets this itself; use its own setting")
        if name.startswith("upstream"):
            raise SettingsError(
                f"gateway.{name}: this gateway answers from the engine that the launcher starts; before another server "
                "start it alone, `python -m agent_runtime.gateway` (docs/upstreams.md)"
            )
    return {**ours, **resolved.settings.gateway}


def _gateway_settings(resolved: Resolved) -> dict[str, Any]:
    return {
        "model": resolved.served_name,
        "tokenizer_dir": str(resolved.model_dir),
        "engine_url": resolved.settings.router_url or resolved.engine_url,
        "host": resolved.settings.host,
        "port": resolved.gateway_port,
        "api_keys_file": resolved.settings.api_keys_file,
        "api_keys_env": resolved.settings.api_keys_env,
        "allow_no_keys": resolved.settings.allow_no_keys,
        "context_len": resolved.context_len,
        "images": resolved.why_text_only is None,
        "allow_image_files": resolved.settings.allow_image_files,
        "allow_image_hosts": resolved.settings.allow_image_hosts,
        "guard": resolved.settings.guard,
        "ledger": resolved.settings.ledger,
        "ledger_shared": resolved.settings.ledger_shared == "on",
        "cache_hints": resolved.settings.cache_hints == "on",
        "cache_routes": resolved.settings.cache_routes == "on",
        "inspector": resolved.settings.inspector,
        "inspector_content": resolved.settings.inspector_content == "on",
        "constrained_by_default": resolved.constrain,
        "fixed_sampling": resolved.settings.fixed_sampling == "on",
        "seeded_sampling": resolved.settings.engine.get("enable-deterministic-inference") is True,
        "shutdown_grace_s": resolved.settings.stop_grace_s,
        "drain_notice_s": resolved.settings.drain_notice_s,
        "metrics": resolved.settings.metrics == "on",
        "log_format": resolved.settings.log_format,
    }


def without_keys(environment: Mapping[str, str], settings: LaunchSettings) -> dict[str, str]:
    """An environment for the engine, which has no use for the gateway's keys."""
    return {name: value for name, value in environment.items() if name != settings.api_keys_env}


def gateway_command(resolved: Resolved, settings_file: Path) -> list[str]:
    """The gateway's command line."""
    options = ["--settings", str(settings_file), "--log-level", resolved.settings.log_level]
    return [sys.executable, "-m", "agent_runtime.gateway", *options]
