"""Which SGLang flags and variables a configuration may add to the launcher's, and why others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from k3_sglang.launch.settings import EngineValue, SettingsError

FORBIDDEN_FLAGS: Final = {
    "trust-remote-code": "no code from a checkpoint directory is executed",
    "radix-eviction-policy": "the state cache evicts by its own policy",
    "config": "a second file could contradict every setting; write SGLang's flags into this mapping",
    "api-key": "the gateway could not reach its engine, and every user of the machine could read it among processes; "
    "keys are the gateway's, api_keys_file or api_keys_env",
    "admin-api-key": "every user of the machine could read it in the list of processes; the engine listens on loopback",
    "dp-size": "it starts whole copies of the model behind one address; start a launcher for each copy, or set attn_dp",
    "enable-dp-attention": "it is SGLang's old name for attention groups; set attn_dp",
}
"""Flags the ``engine`` mapping may not carry, with the reason."""

NOT_WITH_K3_CACHE: Final = {
    "speculative-algorithm": "states at exact ends are not kept under speculation",
    "enable-session-radix-cache": "the k3 cache takes sessions as hints",
    "enable-int8-mamba-checkpoint": "with the k3 cache it is checkpoint_format",
    "mamba-max-states-per-path": "the k3 cache needs no cap",
}
"""Flags the ``engine`` mapping may carry only with ``cache: sglang``, with the reason."""

OWN_SETTINGS: Final = {
    "attn-dp-size": "attn_dp",
    "dcp-size": "dcp",
    "nnodes": "nodes",
    "node-rank": "node_rank",
    "dist-init-addr": "dist_init_addr",
    "disaggregation-mode": "disaggregation",
    "max-running-requests": "max_running_requests",
    "max-total-tokens": "kv_tokens",
    "max-mamba-cache-size": "state_slots",
    "page-size": "page_size",
    "chunked-prefill-size": "chunked_prefill_tokens",
    "disable-overlap-schedule": "overlap",
}
"""Flags that are given only where a setting asks for them. As further flags they would pass by every check of it."""

OTHER_NAMES: Final = {
    "model": "model-path",
    "tensor-parallel-size": "tp-size",
    "pipeline-parallel-size": "pp-size",
    "expert-parallel-size": "ep-size",
    "attention-data-parallel-size": "attn-dp-size",
    "decode-context-parallel-size": "dcp-size",
    "data-parallel-size": "dp-size",
    "nccl-init-addr": "dist-init-addr",
}
"""SGLang's second names of flags that are the launcher's or refused. It also accepts every unambiguous beginning."""

READ_BY_CHECKS: Final = (
    "attention-backend",
    "cuda-graph-max-bs-decode",
    "decode-attention-backend",
    "disable-radix-cache",
    "disaggregation-bootstrap-port",
    "disaggregation-transfer-backend",
    "enable-deterministic-inference",
    "enable-dp-lm-head",
    "enable-eplb",
    "enable-hicache",
    "enable-hierarchical-cache",
    "enable-int8-mamba-checkpoint",
    "enable-linear-replayssm-spec",
    "enable-lora",
    "enable-symm-mem",
    "ep-num-redundant-experts",
    "hicache-ratio",
    "kv-cache-dtype",
    "linear-replayssm-cache-len",
    "load-format",
    "mamba-full-memory-ratio",
    "mamba-ssm-dtype",
    "mem-fraction-static",
    "moe-a2a-backend",
    "moe-runner-backend",
    "prefill-attention-backend",
    "shared-experts-tp-size",
    "speculative-algorithm",
    "speculative-draft-model-path",
    "speculative-dspark-block-size",
)
"""Flags that planner, rules or gateway look for by their full names; a beginning of one would pass them by."""

OWN_VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "PYTHONWARNINGS",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_EXTERNAL_MODEL_PACKAGE",
    "SGLANG_PLATFORM",
    "SGLANG_PLUGINS",
    "SGLANG_USE_CPU_ENGINE",
)
"""Variables that the ``environment`` mapping may not carry: they switch the plugin off, or the launcher sets them."""


def further_flag(name: str, value: EngineValue, taken: Mapping[str, str], cache: str) -> str | None:
    """The value of one flag of the ``engine`` mapping; None is a bare flag.

    Args:
        taken: the launcher's own flags in this launch, each with its reason.
        cache: ``k3`` or ``sglang``.

    Raises:
        SettingsError: a flag that is refused, that the launcher sets, or that is not written in full.
    """
    if name.startswith("-") or "_" in name:
        wanted = name.lstrip("-").replace("_", "-")
        raise SettingsError(f"engine.{name}: write SGLang's long flag without leading dashes, {wanted!r}")
    full = OTHER_NAMES.get(name, name)
    if full in FORBIDDEN_FLAGS:
        raise SettingsError(f"engine.{name} is refused: {FORBIDDEN_FLAGS[full]}")
    if full in NOT_WITH_K3_CACHE and cache == "k3":
        raise SettingsError(f"engine.{name} is refused: {NOT_WITH_K3_CACHE[full]}; set cache to 'sglang' to use it")
    if full in taken:
        raise SettingsError(
            f"engine.{name}: the launcher sets --{full} itself ({taken[full]}); to choose it, use its own setting"
        )
    if full in OWN_SETTINGS:
        raise SettingsError(f"engine.{name}: the launcher has a setting for --{full}; use {OWN_SETTINGS[full]}")
    known = (*FORBIDDEN_FLAGS, *NOT_WITH_K3_CACHE, *taken, *OWN_SETTINGS, *READ_BY_CHECKS)
    for longer in () if name in known else known:
        if longer.startswith(name):
            raise SettingsError(f"engine.{name}: SGLang would read it as --{longer}; write flags in full")
    if value is False:
        raise SettingsError(f"engine.{name} is false; SGLang's switches cannot be given as off: leave the key out")
    return None if value is True else str(value)


def check_variable(name: str, added: Mapping[str, str], keys_variable: str | None) -> None:
    """Refuse a variable of the ``environment`` mapping that is not the configuration's to set.

    Args:
        added: the launcher's own variables in this launch.
        keys_variable: variable with the gateway's keys, if there is one.

    Raises:
        SettingsError: naming the variable and what to do.
    """
    if name == keys_variable:
        raise SettingsError(
            f"environment.{name}: it holds the gateway's keys (api_keys_env), and this mapping is the engine's, which "
            "must not have them; set it in the environment of the launcher"
        )
    if name in added or name.startswith("K3_SGLANG_") or name in OWN_VARIABLES:
        raise SettingsError(f"environment.{name}: the launcher decides this variable itself; leave it out")
