"""SGLang's flags as the planner reads them: the layout and what its pool arithmetic depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from k3_sglang.launch.planner.hardware import Gpu
from k3_sglang.launch.planner.layout import NO_TRANSPORT, Layout
from k3_sglang.launch.planner.pools import DEFAULT_STATE_RATIO, PoolSettings, Role, Strategy
from k3_sglang.launch.settings import SettingsError

Flags = Mapping[str, str | None]
"""Long names without dashes; None is a bare flag."""

KV_DTYPE_BYTES = {"auto": 2, "bf16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
STATE_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
EXPERT_TRANSPORTS_SPAN_TP = ("deepep", "megamoe", "flashinfer_megamoe", "mooncake", "mori", "flashinfer", "deepep_v2")
"""With these SGLang makes ``ep`` as large as ``tp``."""

DRAFT_KV_BYTES = 1_434
"""Latents of a DSpark draft per token, on every rank: "~1.4 KB" in SGLang's K3 recipe; not checked."""
DRAFT_BYTES = 4_500_000_000
"""Of a published DSpark draft for K3 (4.50 GB); not checked."""
DEFAULT_BLOCK = 7
DEFAULT_HOST_RATIO = 2.0
"""``--hicache-ratio`` when none is given (``arg_groups/hicache_hook.py``)."""

_PAGED_BY_KERNEL = ("trtllm_mla", "cutedsl_mla", "flashmla")
"""Attention backends that SGLang gives pages of 64 tokens."""


def layout_of(flags: Flags) -> Layout:
    """The groups that flags ask for.

    Raises:
        SettingsError: a size that is no number.
    """
    tp, transport = _int(flags, "tp-size", 1), flags.get("moe-a2a-backend") or NO_TRANSPORT
    return Layout(
        tp=tp,
        pp=_int(flags, "pp-size", 1),
        ep=tp if transport in EXPERT_TRANSPORTS_SPAN_TP else _int(flags, "ep-size", 1),
        attn_dp=_int(flags, "attn-dp-size", 1),
        dcp=_int(flags, "dcp-size", 1),
        nodes=_int(flags, "nnodes", 1),
        transport=transport,
        shared_tp=_int(flags, "shared-experts-tp-size", 1),
        redundant_experts=_int(flags, "ep-num-redundant-experts", 0),
    )


def pool_settings_of(flags: Flags, gpu: Gpu | None, *, context_len: int, images: bool = False) -> PoolSettings:
    """What the pool arithmetic reads of flags; SGLang's defaults for K3 where they are silent.

    Args:
        gpu: decides what SGLang leaves open: pages, prefill chunks. None is a CPU.

    Raises:
        SettingsError: a value that is none of its kind.
    """
    speculative = "speculative-algorithm" in flags
    block = _int(flags, "speculative-dspark-block-size", DEFAULT_BLOCK)
    return PoolSettings(
        context_len=context_len,
        memory_fraction=_number(flags, "mem-fraction-static", float),
        state_ratio=_number(flags, "mamba-full-memory-ratio", float) or DEFAULT_STATE_RATIO,
        state_slots=_number(flags, "max-mamba-cache-size", int),
        kv_tokens=_number(flags, "max-total-tokens", int),
        max_running_requests=_number(flags, "max-running-requests", int) or (48 if speculative else None),
        page_size=page_size(flags, gpu),
        kv_dtype_bytes=_one_of(flags, "kv-cache-dtype", "auto", KV_DTYPE_BYTES),
        state_dtype_bytes=_one_of(flags, "mamba-ssm-dtype", "float32", STATE_DTYPE_BYTES),
        strategy=cast(Strategy, _strategy(flags)),
        overlap="disable-overlap-schedule" not in flags,
        prefix_cache="disable-radix-cache" not in flags,
        chunked_prefill_tokens=_int(flags, "chunked-prefill-size", default_chunk(gpu)),
        draft_tokens=block + 1 if speculative else 0,
        draft_kv_bytes_per_token=DRAFT_KV_BYTES if speculative else 0,
        draft_weight_bytes=DRAFT_BYTES if speculative else 0,
        replay_states="enable-linear-replayssm-spec" in flags,
        ring_len=_int(flags, "linear-replayssm-cache-len", 16),
        role=cast(Role, {"prefill": "prefill", "decode": "decode"}.get(flags.get("disaggregation-mode") or "", "none")),
        host_ratio=_host_ratio(flags),
        images=images,
        decode_graph_requests=_number(flags, "cuda-graph-max-bs-decode", int),
    )


def page_size(flags: Flags, gpu: Gpu | None) -> int:
    """Tokens of a page: given, or 64 where the attention kernel that SGLang takes for K3 wants it."""
    given = _number(flags, "page-size", int)
    backends = {flags.get(f"{kind}attention-backend") for kind in ("", "decode-", "prefill-")} - {None}
    if given in (32, 64):
        return given
    if backends & set(_PAGED_BY_KERNEL) or (not backends and gpu is not None and gpu.family in ("sm100", "sm103")):
        return 64
    return given or 1


def default_chunk(gpu: Gpu | None) -> int:
    """``--chunked-prefill-size`` when none is given, by memory (``handle_gpu_memory_settings``)."""
    if gpu is None:
        return 4096
    limits = ((20, 2048), (60, 4096), (160, 8192))
    return next((tokens for gib, tokens in limits if gpu.memory_mib < gib * 1024), 16384)


def _host_ratio(flags: Flags) -> float:
    if not {"enable-hierarchical-cache", "enable-hicache"} & set(flags):
        return 0.0
    return _number(flags, "hicache-ratio", float) or DEFAULT_HOST_RATIO


def _strategy(flags: Flags) -> str:
    given = flags.get("mamba-radix-cache-strategy") or "auto"
    if given != "auto":
        return given
    return "no_buffer" if "disable-overlap-schedule" in flags else "extra_buffer"


def _one_of(flags: Flags, name: str, default: str, known: Mapping[str, int]) -> int:
    value = flags.get(name) or default
    if value not in known:
        raise SettingsError(f"engine.{name} is {value!r}; the planner knows {', '.join(known)}")
    return known[value]


def _int(flags: Flags, name: str, default: int) -> int:
    value = _number(flags, name, int)
    return default if value is None else value


def _number(flags: Flags, name: str, kind: Callable[[str], Any]) -> Any:
    value = flags.get(name)
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError as error:
        raise SettingsError(f"engine.{name} is {value!r}; it must be a number") from error
