"""Builds SGLang's real prefix cache on CPU pools of the right size, and says how the engine would use it.

Nothing of the model is there: pools have one tiny layer, so that only slots, locks and the tree are real.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3_sglang import compat
from k3_sglang.cache.replay.budget import Budget
from k3_sglang.cache.replay.schedule import Step

CHECKPOINT_GRID = 64
"""Tokens between the states SGLang's prefill kernels expose, and its cache chunk."""

Chunks = Callable[[int, int, Any, Any], list[int]]


@dataclass(frozen=True)
class Rig:
    """A cache and the engine's rules around it. Positions and lengths are in units of ``budget.grain`` tokens."""

    cache: Any
    req_to_token_pool: Any
    budget: Budget
    chunks: Chunks
    """``(prefix_len, prompt_len, request, match) -> ends of the prefill's chunks``, the last of them ``prompt_len``.

    The request carries its hints in ``sampling_params.custom_params``; ``match`` is the cache's own match result.
    """
    extra_buffer: bool
    """SGLang's snapshot buffers: states on a grid. Otherwise the live state is kept at the exact end."""
    checkpoint_grid: int = 1
    track_interval: int = 1
    slots_per_request: int = 1
    """State slots the engine sets aside per running request; bounds how many may run."""
    hints: Callable[[Step], Any] | None = None
    """What travels in a request's ``custom_params``."""
    closed: Callable[[Step], None] | None = None
    """Called after the last step of a session."""

    @property
    def max_running(self) -> int:
        """Requests that may run at once."""
        return max(self.budget.states // self.slots_per_request, 1)


Build = Callable[[Budget], Rig]


@dataclass(frozen=True)
class UpstreamFlags:
    """SGLang's own choices for states."""

    max_states_per_path: int = -1
    track_interval: int = 256
    extra_buffer: bool = True
    eviction_policy: str = "lru"

    def __str__(self) -> str:
        parts = [] if self.max_states_per_path < 0 else [f"cap {self.max_states_per_path}"]
        parts += [f"interval {self.track_interval}"] if self.extra_buffer and self.track_interval != 256 else []
        parts += [] if self.extra_buffer else ["no_buffer"]
        return ", ".join(parts) or "default"


def upstream_chunks(chunk: int) -> Chunks:
    """SGLang's chunked prefill: full chunks from the prefix on, then the rest."""

    def ends(prefix_len: int, prompt_len: int, req: Any, match: Any) -> list[int]:
        return [*range(prefix_len + chunk, prompt_len, chunk), prompt_len] if prompt_len > prefix_len else []

    return ends


def build_upstream(
    budget: Budget, flags: UpstreamFlags, components: Mapping[Any, type] | None = None, *, context_len: int
) -> Rig:
    """SGLang's ``UnifiedRadixCache`` with its flags, or with other component classes in their place."""
    _set_server_args(budget, flags)
    kinds = compat.ComponentType
    page = max(budget.page // budget.grain, 1)
    requests = _request_pool(budget, flags.extra_buffer, context_len)
    cache = compat.UnifiedRadixCache(
        params=compat.CacheInitParams(
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=_kv_allocator(budget, page, requests.mamba_pool),
            page_size=page,
            disable=False,
            eviction_policy=flags.eviction_policy,
            tree_components=(kinds.FULL, kinds.MAMBA),
            enable_mamba_extra_buffer=flags.extra_buffer,
            component_registry_override=dict(components) if components else None,
        )
    )
    return Rig(
        cache=cache,
        req_to_token_pool=requests,
        budget=budget,
        chunks=upstream_chunks(budget.units(budget.chunk)),
        extra_buffer=flags.extra_buffer,
        checkpoint_grid=max(budget.units(CHECKPOINT_GRID), page),
        track_interval=budget.units(flags.track_interval),
        # The engine's own ratios: three per request, two snapshot buffers or one state copied at its end.
        slots_per_request=5 if flags.extra_buffer else 4,
    )


def build_kv_only(budget: Budget, *, context_len: int) -> Rig:
    """SGLang's cache without the state component: every cached token is a legal prefix."""
    _set_server_args(budget, UpstreamFlags())
    page = max(budget.page // budget.grain, 1)
    requests = compat.ReqToTokenPool(
        size=_rows(budget), max_context_len=context_len, device="cpu", enable_memory_saver=False
    )
    cache = compat.UnifiedRadixCache(
        params=compat.CacheInitParams(
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=_kv_allocator(budget, page, None),
            page_size=page,
            disable=False,
            tree_components=(compat.ComponentType.FULL,),
        )
    )
    return Rig(cache, requests, budget, upstream_chunks(budget.units(budget.chunk)), extra_buffer=False)


def load_object(name: str) -> Any:
    """``package.module:attribute``, for component classes and build functions given on the command line.

    Raises:
        ValueError: not of that form, or nothing is there.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"{name!r} is not of the form package.module:attribute")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be loaded: {error}") from error


def _rows(budget: Budget) -> int:
    return min(budget.states, 64)


def _set_server_args(budget: Budget, flags: UpstreamFlags) -> None:
    args = compat.ServerArgs(
        model_path="dummy",
        device="cpu",
        page_size=max(budget.page // budget.grain, 1),
        mamba_max_states_per_path=flags.max_states_per_path,
        mamba_track_interval=budget.units(flags.track_interval),
    )
    # Normally derived from the model's config, which a replay does not have.
    args._mamba_cache_chunk_size = budget.units(CHECKPOINT_GRID)
    compat.set_global_server_args_for_scheduler(args)


def _request_pool(budget: Budget, extra_buffer: bool, context_len: int) -> Any:
    shape = compat.Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=1, n_groups=1, num_heads=1, head_dim=1, state_size=1, conv_kernel=2
    )
    return compat.HybridReqToTokenPool(
        size=_rows(budget),
        mamba_size=budget.states,
        mamba_spec_state_size=0,
        max_context_len=context_len,
        device="cpu",
        enable_memory_saver=False,
        cache_params=compat.Mamba2CacheParams(shape=shape, layers=[0]),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=extra_buffer,
    )


def _kv_allocator(budget: Budget, page: int, states: Any) -> Any:
    import torch

    size = budget.kv_tokens // budget.grain // page * page
    common: dict[str, Any] = dict(
        size=size, dtype=torch.uint8, page_size=page, head_num=1, head_dim=1, device="cpu", enable_memory_saver=False
    )
    if states is None:
        pool = compat.MHATokenToKVPool(**common, layer_num=1)
    else:
        pool = compat.HybridLinearKVPool(**common, full_attention_layer_ids=[1], mamba_pool=states)
    if page == 1:
        return compat.TokenToKVPoolAllocator(size=size, dtype=torch.uint8, device="cpu", kvcache=pool, need_sort=False)
    return compat.PagedTokenToKVPoolAllocator(
        size=size, page_size=page, dtype=torch.uint8, device="cpu", kvcache=pool, need_sort=False
    )
