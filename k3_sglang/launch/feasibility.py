"""Whether a launch can work at all: no known-bad combination of flags, and weights and pools that fit the GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from k3_sglang.launch.command import engine_flags
from k3_sglang.launch.conflict_rules import RULES
from k3_sglang.launch.conflicts import Facts, broken
from k3_sglang.launch.planner.command import flags_of, plan_of
from k3_sglang.launch.planner.hardware import find_gpu
from k3_sglang.launch.planner.plan import Model, Plan, Workload
from k3_sglang.launch.planner.pools import gib, largest_request
from k3_sglang.launch.planner.release import RELEASE
from k3_sglang.launch.resolve import Resolved
from k3_sglang.launch.settings import LaunchSettings


def problems(resolved: Resolved) -> list[str]:
    """Why this launch must not be started, one line each, with what to do."""
    flags = {flag.name: flag.value for flag in engine_flags(resolved)}
    facts = facts_of(resolved.settings, flags, resolved.device, own_model=resolved.own_model)
    return broken(facts, RULES) + sizes(resolved)


def facts_of(settings: LaunchSettings, flags: Mapping[str, str | None], device: str, *, own_model: bool) -> Facts:
    """A launch as the rules see it."""
    return Facts(
        flags=flags,
        device=device,
        own_model=own_model,
        cache=settings.cache,
        gpu=settings.gpu,
        environment=settings.environment,
        asked_running=settings.max_running_requests,
        asked_slots=settings.state_slots,
        checkpoint_format=settings.checkpoint_format,
        asked_overlap=settings.overlap == "on",
    )


def settings_conflicts(settings: LaunchSettings) -> list[str]:
    """Rules that launch settings break on the GPU they name, without a checkpoint folder."""
    device = "cpu" if settings.device == "cpu" else "cuda"
    flags = {**flags_of(settings), "context-length": str(settings.context_len or 0)}
    facts = facts_of(settings, flags, device, own_model=settings.model_impl == "plugin" or device == "cpu")
    return broken(facts, RULES)


def sizes(resolved: Resolved) -> list[str]:
    """What does not fit, when the kind of GPU is named and one computes."""
    name = resolved.settings.gpu
    if name is None or resolved.device != "cuda":
        return []
    vision = RELEASE.vision_bytes if resolved.config.vision is not None else 0
    model = Model(resolved.served_name, resolved.config.text, vision)
    plan = plan_of(resolved.settings, find_gpu(name), model, Workload())
    if plan.shortage is not None:
        return [
            f"gpu is {name!r}: {gib(plan.shortage.missing_bytes)} too little on each of {plan.layout.gpus} GPUs; "
            f"{plan.shortage.why}: use more GPUs, or see `python -m k3_sglang.launch plan --gpu {name}`"
        ]
    return too_many_requests(resolved.settings, plan) + too_long(plan)


def too_many_requests(settings: LaunchSettings, plan: Plan) -> list[str]:
    """More requests at once than the pools will let run; SGLang would lower the number with a log line."""
    asked = settings.max_running_requests
    if asked is None or plan.pools is None:
        return []
    allowed = plan.pools.max_running_requests * plan.layout.attn_dp
    if asked <= allowed:
        return []
    return [
        f"max_running_requests is {asked}; the pools of this plan let {allowed} run: lower it, raise "
        "engine.mamba-full-memory-ratio, or give state_slots (sglang#33004)"
    ]


def too_long(plan: Plan) -> list[str]:
    """Requests that are accepted and that the latents cannot hold: SGLang ends them without a token, or never."""
    if plan.pools is None:
        return []
    largest = largest_request(plan.pools, plan.settings, plan.layout)
    if plan.settings.context_len <= largest:
        return []
    return [
        f"context_len is {plan.settings.context_len} (the model's, where it is not set); the pools of this plan hold "
        f"requests of at most {largest} tokens: lower it, or leave more memory to latents"
    ]
