"""One plan: a model on GPUs in one layout, what it leaves for pools, how many requests and sessions that serves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from k3_sglang.config import TextConfig
from k3_sglang.costs import flops_per_token
from k3_sglang.launch.planner.hardware import GIB, Gpu
from k3_sglang.launch.planner.layout import Layout, layout_problems
from k3_sglang.launch.planner.pools import (
    DEFAULT_STATE_RATIO,
    Pools,
    PoolSettings,
    Shortage,
    bytes_per_slot,
    bytes_per_token,
    checkpoint_pool_bytes,
    default_memory_fraction,
    gib,
    kept_back_bytes,
    size_pools,
    slots_per_request,
    stages_of,
)
from k3_sglang.launch.planner.weights import Weights, weights_per_gpu

CONTEXTS: Final = tuple(1024 * size for size in (8, 16, 32, 64, 128, 256, 512, 1024))
STATES_PER_SESSION: Final = 2
"""Checkpoints that keep a waiting session reusable: ends of its last turn and of its last prompt (docs/cache.md)."""
DEFAULT_OVERHEAD_GIB: Final = 2.0
"""GPU memory in use before loading: CUDA context, NCCL. An assumption; the engine's log says it ("avail mem")."""


@dataclass(frozen=True)
class Model:
    """What is served."""

    name: str
    text: TextConfig
    vision_bytes: int
    """Of image tower and projector, held whole by every rank of the first stage; 0 where they are not loaded."""


@dataclass(frozen=True)
class Workload:
    """What is asked of a deployment."""

    context: int = 131_072
    """Tokens of a session's prompt and answer together, when it is longest."""
    concurrent: int = 32
    """Requests that run at the same time."""
    sessions: int = 64
    """Sessions that are open, most of them waiting for a tool or a person."""
    turn_tokens: int = 2_000
    """New tokens of a turn: tool results or a message, and the answer."""


@dataclass(frozen=True)
class Row:
    """What one context length allows, over the whole deployment."""

    context: int
    by_latents: int
    """Requests whose latents fit at once."""
    by_states: int
    """Requests that the state pool lets run."""
    running: int
    """The smaller of both, and of what was asked for."""
    sessions: int
    """Sessions that stay reusable between their turns, running ones included."""


@dataclass(frozen=True)
class Plan:
    """A layout and what it comes to. Bytes are those of the fullest GPU."""

    model: Model
    gpu: Gpu
    layout: Layout
    settings: PoolSettings
    workload: Workload
    problems: tuple[str, ...]
    """Why the layout cannot be used; then the rest is empty."""
    weights: Weights | None = None
    overhead_bytes: int = 0
    memory_fraction: float = 0.0
    kept_back_bytes: int = 0
    checkpoint_bytes: int = 0
    """Pool of kept states in a format of their own: made after SGLang's pools, so it lies in what is kept back."""
    rest_bytes: int = 0
    pools: Pools | None = None
    shortage: Shortage | None = None
    rows: tuple[Row, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it starts at all."""
        return self.pools is not None

    @property
    def at_workload(self) -> Row | None:
        """What it serves at the workload's context length."""
        return None if self.pools is None else row(self, self.workload.context)

    @property
    def meets(self) -> bool:
        """Whether it serves the workload."""
        here = self.at_workload
        return here is not None and here.running >= self.workload.concurrent and here.sessions >= self.workload.sessions


def make_plan(
    model: Model,
    gpu: Gpu,
    layout: Layout,
    settings: PoolSettings,
    workload: Workload,
    *,
    overhead_gib: float = DEFAULT_OVERHEAD_GIB,
) -> Plan:
    """Compute a plan; what does not fit is in ``shortage`` or ``problems``, never an exception."""
    problems = layout_problems(layout, model.text)
    if problems:
        return Plan(model, gpu, layout, settings, workload, tuple(problems))
    weights = weights_per_gpu(
        model.text, layout, vision_bytes=model.vision_bytes, draft_bytes=settings.draft_weight_bytes
    )
    overhead = int(overhead_gib * GIB)
    free_before = gpu.memory_bytes - overhead
    fraction = settings.memory_fraction or default_memory_fraction(gpu.memory_mib, settings, layout)
    kept = kept_back_bytes(free_before, fraction, settings)
    rest = free_before - weights.bytes - kept
    checkpoints = checkpoint_pool_bytes(model.text, settings, layout)
    work = free_before * (1 - default_memory_fraction(gpu.memory_mib, settings, layout))
    sized: Pools | Shortage
    if checkpoints and kept - checkpoints < work:
        missing = checkpoints + work - kept
        why = (
            f"checkpoint_slots take {gib(checkpoints)} of the {gib(kept)} that engine.mem-fraction-static keeps back, "
            f"and SGLang's rule wants {gib(work)} of it: set it to {fraction - missing / free_before:.3f} or less"
        )
        sized = Shortage(int(missing), why)
    elif rest <= 0:
        sized = Shortage(int(-rest), f"weights take {gib(weights.bytes)} of {gib(gpu.memory_bytes)}")
    else:
        sized = size_pools(model.text, layout, settings, rest)
    plan = Plan(
        model,
        gpu,
        layout,
        settings,
        workload,
        (),
        weights=weights,
        overhead_bytes=overhead,
        memory_fraction=fraction,
        kept_back_bytes=int(kept),
        checkpoint_bytes=checkpoints,
        rest_bytes=int(rest),
        pools=sized if isinstance(sized, Pools) else None,
        shortage=sized if isinstance(sized, Shortage) else None,
    )
    longest = min(settings.context_len, model.text.max_position_embeddings)
    contexts = [context for context in CONTEXTS if context <= longest]
    return plan if plan.pools is None else replace(plan, rows=tuple(row(plan, context) for context in contexts))


def row(plan: Plan, context: int) -> Row:
    """Concurrency at one context length."""
    pools, layout, page = plan.pools, plan.layout, plan.settings.page_size * plan.layout.dcp
    assert pools is not None
    tokens = pools.kv_tokens * layout.dcp
    each = -(-context // page) * page
    by_latents = tokens // each * layout.attn_dp
    by_states = pools.state_slots // pools.slots_per_request * layout.attn_dp
    running = min(by_latents, pools.max_running_requests * layout.attn_dp)
    own_pool = plan.settings.checkpoint_format != "state"
    kept_slots = plan.settings.checkpoint_slots if own_pool else pools.state_slots
    kept = kept_slots // STATES_PER_SESSION * layout.attn_dp
    reusable = plan.settings.prefix_cache and plan.settings.role != "decode"
    sessions = min(by_latents, max(kept, running)) if reusable else running
    return Row(context, by_latents, by_states, running, sessions)


def balanced_ratio(text: TextConfig, layout: Layout, settings: PoolSettings, workload: Workload) -> float:
    """Share of states to latents (``--mamba-full-memory-ratio``) at which both pools run out together.

    States: those set aside for running requests, and those that keep waiting sessions reusable. Latents: those of all
    open sessions at the workload's context.
    """
    if layout_problems(layout, text):
        return DEFAULT_STATE_RATIO
    drafts = 0 if settings.replay_states else settings.draft_tokens
    running = slots_per_request(settings, layout) + drafts
    slots = running * workload.concurrent
    if settings.prefix_cache and settings.role != "decode":
        slots = max(slots, STATES_PER_SESSION * workload.sessions)
    stage_cells = [bytes_per_token(text, settings, stage) for stage in stages_of(text, layout)]
    cell = max(stage_cells) / layout.dcp + settings.draft_kv_bytes_per_token
    states = slots * bytes_per_slot(text, settings, layout)
    latents = max(workload.sessions, workload.concurrent) * workload.context * cell
    return max(round(states / latents, 3), 0.001)


def prefill_bound_s(plan: Plan, cached_tokens: int, new_tokens: int) -> float:
    """Seconds that computing ``new_tokens`` behind ``cached_tokens`` takes on all GPUs at the FP8 peak, at least."""
    rate = plan.gpu.fp8_flops or plan.gpu.fp4_flops
    assert rate is not None
    flops = flops_per_token(plan.model.text, cached_tokens + new_tokens // 2) * new_tokens
    return flops / (rate * plan.layout.gpus)


def crossing_bytes(plan: Plan) -> int:
    """Bytes that each GPU sends over the network for one token, where a group of ranks is larger than its links join.

    Two sums over the group in every layer, of the running stream; a ring sends nearly twice the vector.
    """
    group, text = plan.layout.tp, plan.model.text
    if group <= plan.gpu.joined:
        return 0
    return int(2 * (group - 1) / group * 2 * text.num_layers * text.hidden_size * 2) // plan.layout.pp


@dataclass(frozen=True)
class DecodeBound:
    """What one decode step has to read on a GPU, and how long that takes at the peak bandwidth: no engine is faster."""

    requests: int
    expert_bytes: int
    other_weight_bytes: int
    state_bytes: int
    latent_bytes: int
    seconds: float


def decode_bound(plan: Plan, context: int, requests: int) -> DecodeBound:
    """Bytes a GPU moves for one token of each of ``requests`` (over the whole deployment) at a context length.

    A batch touches ``experts · (1 - (1 - k/experts)^requests)`` experts of a layer if all are equally likely. States
    are read and written.
    """
    assert plan.weights is not None
    text, layout, moe = plan.model.text, plan.layout, plan.model.text.moe
    touched = 1 - (1 - moe.experts_per_token / moe.num_experts) ** requests
    experts = int(plan.weights.parts.get("routed experts", 0) * touched)
    other = plan.weights.bytes - plan.weights.parts.get("routed experts", 0) - plan.weights.parts.get("vision", 0)
    local = -(-requests // layout.attn_dp)
    states = 2 * local * bytes_per_slot(text, plan.settings, layout)
    cell = max(bytes_per_token(text, plan.settings, stage) for stage in stages_of(text, layout))
    latents = local * context * cell // layout.dcp
    moved = experts + other + states + latents
    return DecodeBound(requests, experts, other, states, latents, layout.pp * moved / plan.gpu.bandwidth_bytes_s)
