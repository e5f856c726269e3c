"""Layouts that a number of GPUs allows, in the order they are preferred, and the one that serves a workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3_sglang.launch.planner.hardware import Gpu
from k3_sglang.launch.planner.layout import Layout, layout_problems
from k3_sglang.launch.planner.plan import Model, Plan, Workload, balanced_ratio, make_plan
from k3_sglang.launch.planner.pools import PoolSettings


def candidates(gpu: Gpu, gpus: int, nodes: int, model: Model) -> list[Layout]:
    """Layouts worth comparing: one group, a group for each node as a stage (over a network), a stage for each GPU.

    Hopper's kernels take whole experts (SGLang's recipes for H100 and H200), so experts are dealt out there. Attention
    DP and decode context parallelism are not proposed: they cost latents or need a kernel; ask for them by flag.
    """
    ep = gpus if gpu.family == "sm90" else 1
    layouts = [Layout(tp=gpus, ep=ep, nodes=nodes)]
    if nodes > 1 and gpus % nodes == 0 and gpus > gpu.joined:
        stage = gpus // nodes
        layouts.append(Layout(tp=stage, ep=stage if gpu.family == "sm90" else 1, pp=nodes, nodes=nodes))
    layouts.append(Layout(pp=gpus, nodes=nodes))
    return [layout for layout in dict.fromkeys(layouts) if not layout_problems(layout, model.text)]


def compare(
    model: Model,
    gpu: Gpu,
    layouts: Sequence[Layout],
    settings: PoolSettings,
    workload: Workload,
    *,
    balance: bool,
    overhead_gib: float,
) -> list[Plan]:
    """A plan for each layout.

    Args:
        balance: choose the share of states for the workload, instead of the one in ``settings``.
    """
    plans: list[Plan] = []
    for layout in layouts:
        ratio = balanced_ratio(model.text, layout, settings, workload) if balance else settings.state_ratio
        tuned = replace(settings, state_ratio=ratio)
        plans.append(make_plan(model, gpu, layout, tuned, workload, overhead_gib=overhead_gib))
    return plans


def best(plans: Sequence[Plan]) -> Plan:
    """The one that serves most of the workload; of equals the first. Of none that fits, the one that lacks least.

    Raises:
        ValueError: no plans.
    """
    if not plans:
        raise ValueError("no layout to choose from")
    return max(plans, key=_merit)


def _merit(plan: Plan) -> tuple[int, int, int, int, int]:
    here = plan.at_workload
    if here is None:
        missing = plan.shortage.missing_bytes if plan.shortage is not None else 1 << 62
        return 0, -missing, 0, 0, 0
    running, sessions = min(here.running, plan.workload.concurrent), min(here.sessions, plan.workload.sessions)
    # A stage for every GPU holds most and answers slowest: each token passes all of them. Only where nothing else fits.
    shallow = int(plan.layout.pp <= plan.layout.nodes)
    return 1 + shallow, int(plan.meets), sessions + running, -plan.layout.pp, here.sessions
