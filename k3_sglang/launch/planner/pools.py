"""Sizes of SGLang's two pools, computed as SGLang 0.5.23 computes them from the memory that loading leaves.

Sources, below ``sglang/srt``: ``arg_groups/memory_hook.py`` (share of memory), ``mem_cache/kv_cache_configurator.py``
(split into states and latents, running requests), ``model_executor/pool_configurator.py`` (bytes of a token).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from k3_sglang.config import TextConfig
from k3_sglang.launch.planner.hardware import GIB, MIB
from k3_sglang.launch.planner.layout import Layout, stages

Strategy = Literal["no_buffer", "extra_buffer", "extra_buffer_lazy"]
Role = Literal["none", "prefill", "decode"]
"""``none`` serves whole requests; the others are the two sides of disaggregation."""

CheckpointFormat = Literal["state", "bfloat16", "int8"]

BASE_SLOTS: Final = 3
"""State slots that SGLang sets aside for a running request before any for tracking."""
DEFAULT_STATE_RATIO: Final = 0.9
"""``--mamba-full-memory-ratio``: bytes of states for one byte of latents."""
LARGE_GPU_MIB: Final = 60 * 1024
MIN_LARGE_RESERVE_MIB: Final = 10 * 1024
IMAGE_CACHE_MIB: Final = 100
"""Kept back for embeddings of pictures (``SGLANG_VLM_CACHE_SIZE_MB``), with images only."""
MAX_ESTIMATED_REQUESTS: Final = 4096
MIN_ESTIMATED_REQUESTS: Final = 2048


@dataclass(frozen=True)
class PoolSettings:
    """What SGLang's arithmetic reads of the arguments; None is what it decides itself."""

    context_len: int
    memory_fraction: float | None = None
    state_ratio: float = DEFAULT_STATE_RATIO
    state_slots: int | None = None
    kv_tokens: int | None = None
    max_running_requests: int | None = None
    page_size: int = 1
    kv_dtype_bytes: int = 2
    state_dtype_bytes: int = 4
    conv_dtype_bytes: int = 2
    strategy: Strategy = "no_buffer"
    overlap: bool = True
    prefix_cache: bool = True
    chunked_prefill_tokens: int = 8192
    draft_tokens: int = 0
    """Positions verified together with speculative decoding: the block and one; 0 without."""
    draft_kv_bytes_per_token: int = 0
    draft_weight_bytes: int = 0
    replay_states: bool = False
    """Whether drafts are replayed from a ring instead of kept as states (``--enable-linear-replayssm-spec``)."""
    ring_len: int = 16
    role: Role = "none"
    host_ratio: float = 0.0
    """Host memory of the tier below, in GPU pools of the same rank (``--hicache-ratio``); 0 without a tier."""
    images: bool = False
    decode_graph_requests: int | None = None
    """Largest batch of a decode graph; 0 without graphs."""
    prefill_graphs: bool = False
    checkpoint_format: CheckpointFormat = "state"
    """How the k3 cache stores kept states; ``state``: among those of running requests."""
    checkpoint_slots: int = 0
    """Slots of a pool of kept states, in another format than ``state``."""


@dataclass(frozen=True)
class Pools:
    """Both pools of one rank, and what follows from them."""

    kv_tokens: int
    """Tokens a rank has latents for; with decode context parallelism the group has ``dcp`` times as many."""
    kv_bytes: int
    state_slots: int
    state_bytes: int
    """One padding slot included, as allocated."""
    draft_state_bytes: int
    """Intermediate states of verified positions."""
    max_running_requests: int
    """Per attention group."""
    slots_per_request: int
    bytes_per_token: int
    bytes_per_slot: int


@dataclass(frozen=True)
class Shortage:
    """What does not fit."""

    missing_bytes: int
    why: str


def slots_per_request(settings: PoolSettings, layout: Layout) -> int:
    """State slots SGLang sets aside for each running request (``_calculate_mamba_ratio``)."""
    if not settings.prefix_cache or settings.role == "decode":
        return 1
    overlap = settings.overlap and layout.pp == 1
    tracked = {"no_buffer": 0, "extra_buffer": 2 if overlap else 1, "extra_buffer_lazy": 1}[settings.strategy]
    return BASE_SLOTS + tracked


def default_memory_fraction(gpu_mib: int, settings: PoolSettings, layout: Layout) -> float:
    """``--mem-fraction-static`` when none is given (``handle_gpu_memory_settings``), MLA model, no DeepEP buffers."""
    graph_requests = graph_batch(gpu_mib, settings, layout)
    if settings.role == "decode":
        requests = settings.max_running_requests or graph_requests or 1
        activation_tokens = max(requests * max(settings.draft_tokens, 1), 2048)
    else:
        activation_tokens = max(settings.chunked_prefill_tokens, 2048)
    reserved = 512 + activation_tokens * 1.5 + layout.tp * layout.pp / 8 * 1024
    if settings.role != "prefill":
        reserved += graph_requests * 2
        if layout.attn_dp > 1:
            reserved += graph_requests * layout.attn_dp * (4.5 if graph_requests > 300 else 3)
    if settings.role != "decode" and settings.prefill_graphs:
        reserved += 1536
    if gpu_mib > LARGE_GPU_MIB:
        reserved = max(reserved, MIN_LARGE_RESERVE_MIB)
    fraction = round((gpu_mib - reserved) / gpu_mib, 3)
    # SGLang looks for the tower's size under names that K3's configuration does not have, so it takes its baseline.
    return fraction * 0.95 if settings.images and settings.role != "decode" else fraction


def graph_batch(gpu_mib: int, settings: PoolSettings, layout: Layout) -> int:
    """Most requests of a decode graph: by the memory of the GPU, at most the requests that run."""
    if settings.decode_graph_requests is not None:
        return settings.decode_graph_requests
    few = layout.tp < 4
    limits = ((20, 8), (35, 48 if few else 160), (60, 32 if few else 160), (160, 256 if few else 512))
    most = next((requests for gib, requests in limits if gpu_mib < gib * 1024), 512)
    return min(most, settings.max_running_requests or most)


def bytes_per_token(text: TextConfig, settings: PoolSettings, layers: range) -> int:
    """Latent bytes of one token on a rank; decode context parallelism deals out tokens, not bytes of one."""
    mla_layers = sum(layer in layers for layer in text.mla_layers)
    return mla_layers * text.mla.latent_dim * settings.kv_dtype_bytes


def bytes_per_slot(text: TextConfig, settings: PoolSettings, layout: Layout) -> int:
    """State bytes of one slot on a rank: heads are split over the attention group; the fullest stage counts."""
    kda = text.kda
    recurrent = kda.num_heads // layout.attn_tp * kda.head_dim**2
    conv = (kda.conv_kernel_size - 1) * kda.conv_channels // layout.attn_tp
    per_layer = recurrent * settings.state_dtype_bytes + conv * settings.conv_dtype_bytes
    return per_layer * max(sum(layer in stage for layer in text.kda_layers) for stage in stages_of(text, layout))


def checkpoint_pool_bytes(text: TextConfig, settings: PoolSettings, layout: Layout) -> int:
    """Pool of kept states on a rank (``cache/formats.py``), beside SGLang's pools; 0 where they lie among the others.

    int8 has a scale of four bytes for each row of a head. One padding slot is allocated more.
    """
    if settings.checkpoint_format == "state":
        return 0
    kda = text.kda
    heads, rows = kda.num_heads // layout.attn_tp, kda.head_dim
    row = rows * 2 if settings.checkpoint_format == "bfloat16" else rows + 4
    conv = (kda.conv_kernel_size - 1) * kda.conv_channels // layout.attn_tp * settings.conv_dtype_bytes
    layers = max(sum(layer in stage for layer in text.kda_layers) for stage in stages_of(text, layout))
    return (settings.checkpoint_slots + 1) * layers * (heads * rows * row + conv)


def largest_request(pools: Pools, settings: PoolSettings, layout: Layout) -> int:
    """Tokens of the longest request that the latents hold; SGLang keeps two pages back."""
    return max(0, (pools.kv_tokens - 2 * settings.page_size) * layout.dcp)


def ring_bytes_per_slot(text: TextConfig, settings: PoolSettings, layout: Layout) -> int:
    """Ring of inputs beside each slot with ``replay_states``: raw v and k, beta, decay, and the d and k rings."""
    if not settings.replay_states:
        return 0
    heads, dim, length = text.kda.num_heads // layout.attn_tp, text.kda.head_dim, settings.ring_len
    values = 4 * heads * length * dim * settings.conv_dtype_bytes
    per_layer = values + heads * length * 4 + heads * length * dim * 4
    return per_layer * max(sum(layer in stage for layer in text.kda_layers) for stage in stages_of(text, layout))


def stages_of(text: TextConfig, layout: Layout) -> list[range]:
    """Layers of each pipeline stage."""
    return stages(text.num_layers, layout.pp)


def size_pools(text: TextConfig, layout: Layout, settings: PoolSettings, rest_bytes: float) -> Pools | Shortage:
    """Split what is left for pools on one rank.

    Args:
        rest_bytes: free after loading, less what ``memory_fraction`` keeps back.
    """
    slot, ring = bytes_per_slot(text, settings, layout), ring_bytes_per_slot(text, settings, layout)
    ratio = slots_per_request(settings, layout)
    drafts = 0 if settings.replay_states or settings.role == "prefill" else settings.draft_tokens
    requested = settings.max_running_requests
    per_group = max(1, requested // layout.attn_dp) if requested is not None else None
    slots = _state_slots(settings, layout, rest_bytes, slot, ring, ratio, drafts, per_group)
    if slots <= 0:
        return Shortage(int((slot + ring) * (1 - slots) - min(rest_bytes, 0)), "no room for a single state slot")
    drafted = slot * (min(per_group or slots, slots // ratio) + 1) * drafts if drafts else 0
    states = (slots + 1) * (slot + ring)
    left = rest_bytes - drafted - states
    cells = [bytes_per_token(text, settings, stage) for stage in stages_of(text, layout)]
    cell = max(cells) + settings.draft_kv_bytes_per_token
    if left < cell * settings.page_size:
        return Shortage(int(cell * settings.page_size - left), "state slots leave no room for latents")
    tokens = int(left // cell) // settings.page_size * settings.page_size
    if settings.kv_tokens is not None:
        tokens = min(tokens, settings.kv_tokens // settings.page_size * settings.page_size)
    return Pools(
        kv_tokens=tokens,
        kv_bytes=(tokens + settings.page_size) * cell,
        state_slots=slots,
        state_bytes=states,
        draft_state_bytes=drafted,
        max_running_requests=_running(settings, tokens, slots // ratio, per_group),
        slots_per_request=ratio,
        bytes_per_token=cell,
        bytes_per_slot=slot + ring,
    )


def _state_slots(
    settings: PoolSettings,
    layout: Layout,
    rest_bytes: float,
    slot: int,
    ring: int,
    ratio: int,
    drafts: int,
    per_group: int | None,
) -> int:
    """``_handle_max_mamba_cache``: given, or as many as the running requests, or a share of the rest."""
    if settings.state_slots is not None:
        return settings.state_slots // layout.attn_dp
    if (not settings.prefix_cache or settings.role == "decode") and per_group is not None:
        return per_group
    budget = rest_bytes * settings.state_ratio / (1 + settings.state_ratio)
    if drafts:
        return int((budget - slot * (1 + drafts) - ring) // (slot * (1 + drafts / ratio) + ring))
    return int((budget - (slot + ring)) // (slot + ring))


def _running(settings: PoolSettings, tokens: int, by_states: int, per_group: int | None) -> int:
    """``resolve_max_num_reqs``: asked for or estimated, at most what both pools carry."""
    estimated = int(tokens / settings.context_len * 512)
    wanted = per_group or max(min(estimated, MAX_ESTIMATED_REQUESTS), MIN_ESTIMATED_REQUESTS)
    return min(wanted, tokens // 2, by_states)


def kept_back_bytes(free_before_bytes: float, memory_fraction: float, settings: PoolSettings) -> float:
    """What SGLang leaves out of the pools: for activations, graphs and, with images, their embeddings."""
    images = IMAGE_CACHE_MIB * MIB if settings.images else 0
    return free_before_bytes * (1 - memory_fraction) + images


def gib(size: float) -> str:
    """Bytes for people, in GiB."""
    return f"{size / GIB:.1f} GiB"
