"""Builds the cache inside the scheduler: SGLang's unified radix cache with our two components."""

from __future__ import annotations

import os
from typing import Any

from k3_sglang import compat
from k3_sglang.announce import announce
from k3_sglang.cache.placement import PlacementSettings

BACKEND = "k3"
"""Name for ``--radix-cache-backend``."""

CUT_COST_ENV = "K3_SGLANG_CUT_COST_TOKENS"
"""Overrides :attr:`PlacementSettings.pass_tokens`; set by the launcher."""


def build(context: Any) -> Any:
    """SGLang's factory signature: build the prefix cache of one scheduler.

    Raises:
        ValueError: an SGLang flag that our policy replaces or does not support is set.
    """
    from k3_sglang.cache.component import CheckpointComponent
    from k3_sglang.cache.formats import stored_settings
    from k3_sglang.cache.stored import StoredCheckpointComponent, install

    params = context.params
    refuse_conflicts(params)
    refuse_untried(params)
    classes = components()
    stored = stored_settings()
    if stored is not None:
        install(context, stored)
        classes[compat.ComponentType.MAMBA] = StoredCheckpointComponent
    params.component_registry_override = {**(params.component_registry_override or {}), **classes}
    cache = compat.create_unified_radix_cache(context)
    states = cache.components.get(compat.ComponentType.MAMBA)
    if states is not None:
        states.place_by(placement_settings())
    announce(
        "cache",
        backend=BACKEND,
        component=f"{CheckpointComponent.__module__}.{CheckpointComponent.__qualname__}",
        exact=not params.enable_mamba_extra_buffer,
        cut_grid=None if states is None else states.cut_grid,
    )
    return cache


def components() -> dict[Any, Any]:
    """Our classes by upstream's component type, for ``component_registry_override``."""
    from k3_sglang.cache.component import CheckpointComponent
    from k3_sglang.cache.kv_component import JointKVComponent

    kinds = compat.ComponentType
    return {kinds.FULL: JointKVComponent, kinds.MAMBA: CheckpointComponent}


def placement_settings() -> PlacementSettings:
    """Constants of placement, with what the environment overrides.

    Raises:
        ValueError: the variable is not a positive whole number.
    """
    given = os.environ.get(CUT_COST_ENV)
    if given is None:
        return PlacementSettings()
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(f"{CUT_COST_ENV} is {given!r}; it must be a number of tokens, at least 1")
    return PlacementSettings(pass_tokens=int(given))


def allow_exact_states(original: Any, view: Any, model_arch: str) -> None:
    """Around SGLang's check of strategy ``no_buffer``: its limits on pages and overlapped steps are not ours.

    SGLang takes the state when it looks at a pass's result, which is too late with overlapped steps and at no key with
    larger pages; we copy it behind the pass, where the pass ends a page (:mod:`k3_sglang.cache.snapshots`).
    """
    if view.radix_cache_backend != BACKEND:
        original(view, model_arch)


def refuse_untried(params: Any) -> None:
    """Refuse modes of SGLang in which states at exact ends were never tried.

    Raises:
        ValueError: naming the flag and the remedy.
    """
    if not params.enable_mamba_extra_buffer:
        if compat.get_spec().speculative_algorithm is not None:
            raise ValueError(
                "--speculative-algorithm is set; states at exact ends are not kept under speculation: "
                "add --mamba-radix-cache-strategy extra_buffer"
            )
        if compat.get_disagg().disaggregation_mode != "null":
            raise ValueError(
                "--disaggregation-mode is set; states at exact ends are kept by one engine only: "
                "add --mamba-radix-cache-strategy extra_buffer"
            )


def refuse_conflicts(params: Any) -> None:
    """Refuse flags that would be ignored or contradict the policy.

    Raises:
        ValueError: naming the flag and the remedy.
    """
    if params.enable_session_radix_cache:
        raise ValueError("--enable-session-radix-cache is set; the k3 cache takes sessions as hints: leave it out")
    if params.eviction_policy.lower() != "lru":
        raise ValueError(
            f"--radix-eviction-policy is {params.eviction_policy!r}; the k3 cache evicts by value: leave the flag out"
        )
    cap = compat.get_exec().mamba.mamba_max_states_per_path
    if cap >= 0:
        raise ValueError(f"--mamba-max-states-per-path is {cap}; the k3 cache needs no cap: leave the flag out")
