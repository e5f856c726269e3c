"""A plan as tables for people and as JSON for programs, with the source of every figure that is not arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from k3_sglang.launch.planner.hardware import GIB, NETWORK_BYTES_S
from k3_sglang.launch.planner.plan import Plan, crossing_bytes, decode_bound, prefill_bound_s
from k3_sglang.launch.planner.pools import gib, largest_request
from k3_sglang.launch.planner.weights import checkpoint_bytes

NOTHING_RAN = "Arithmetic only: nothing of this was run on a GPU."


def print_plan(plan: Plan, others: Sequence[Plan], console: Console) -> None:
    """Tables: layouts compared, memory of the fullest GPU, both pools, concurrency, settings."""
    if len(others) > 1:
        console.print(_layouts(others, plan))
    console.print(f"{plan.model.name} on {plan.layout.gpus} x {plan.gpu.name}: {plan.layout.text}", highlight=False)
    for problem in plan.problems:
        console.print(f"  cannot be used: {problem}", highlight=False)
    if plan.weights is None:
        return
    console.print(_memory(plan))
    if plan.shortage is not None:
        missing = gib(plan.shortage.missing_bytes)
        console.print(f"  does not fit: {missing} too little on each GPU; {plan.shortage.why}", highlight=False)
        return
    console.print(_pools(plan))
    console.print(_concurrency(plan))
    console.print(verdict(plan), highlight=False)
    console.print("settings:", highlight=False)
    for name, value in settings(plan).items():
        console.print(f"  {name}: {value}", highlight=False)
    for note in notes(plan):
        console.print(f"* {note}", highlight=False)


def verdict(plan: Plan) -> str:
    """Whether the workload is served, in one line."""
    here, asked = plan.at_workload, plan.workload
    assert here is not None
    if plan.meets:
        return f"serves {asked.concurrent} requests at once and {asked.sessions} sessions of {asked.context} tokens"
    return (
        f"at {asked.context} tokens: {min(here.running, asked.concurrent)} of {asked.concurrent} requests at once, "
        f"{min(here.sessions, asked.sessions)} of {asked.sessions} sessions stay reusable; "
        "ask for fewer or shorter ones, FP8 latents, or more GPUs"
    )


def settings(plan: Plan) -> dict[str, object]:
    """Launch settings that give this plan; the dotted ones belong into the ``engine`` mapping."""
    layout, pools = plan.layout, plan.pools
    found: dict[str, object] = {"gpu": plan.gpu.name, "tp": layout.tp, "pp": layout.pp, "ep": layout.ep}
    found |= {"attn_dp": layout.attn_dp, "dcp": layout.dcp, "nodes": layout.nodes}
    asked = plan.settings
    found["context_len"] = asked.context_len
    if pools is not None:
        found["context_len"] = min(asked.context_len, largest_request(pools, asked, layout))
        found["max_running_requests"] = min(plan.workload.concurrent, pools.max_running_requests * layout.attn_dp)
        found["chunked_prefill_tokens"] = plan.settings.chunked_prefill_tokens
        found["engine.mem-fraction-static"] = plan.memory_fraction
        found["engine.mamba-full-memory-ratio"] = plan.settings.state_ratio
    found["page_size"] = asked.page_size
    found["cache"] = "k3" if asked.strategy == "no_buffer" else "sglang"
    if asked.state_slots is not None:
        found["state_slots"] = asked.state_slots
    if asked.kv_tokens is not None:
        found["kv_tokens"] = asked.kv_tokens
    if asked.checkpoint_format != "state":
        found |= {"checkpoint_format": asked.checkpoint_format, "checkpoint_slots": asked.checkpoint_slots}
    if asked.kv_dtype_bytes == 1:
        found["engine.kv-cache-dtype"] = "fp8_e4m3"
    if asked.state_dtype_bytes == 2:
        found["engine.mamba-ssm-dtype"] = "bfloat16"
    return found


def notes(plan: Plan) -> list[str]:
    """What the figures stand on."""
    text = plan.model.text
    read = checkpoint_bytes(text, plan.model.vision_bytes)
    found = [
        NOTHING_RAN,
        f"GPU memory {plan.gpu.memory_mib} MiB: {plan.gpu.memory_source}",
        f"in use before loading: {gib(plan.overhead_bytes)} assumed; the engine's log says it",
        f"reading {read / 1e12:.2f} TB takes {read / plan.layout.nodes / 60e9:.0f} minutes at 1 GB/s on each machine",
    ]
    crossing = crossing_bytes(plan)
    if crossing:
        took = f"{crossing / NETWORK_BYTES_S * 1e3:.2f} ms at {NETWORK_BYTES_S / 1e9:.0f} GB/s (assumed)"
        found.append(
            f"each token sends {crossing / 1e6:.1f} MB per GPU over the network, {took}, "
            f"in {2 * text.num_layers} sums whose latency comes on top"
        )
    if plan.pools is not None and plan.settings.host_ratio:
        ranks = plan.layout.gpus // plan.layout.nodes
        tier = plan.settings.host_ratio * (plan.pools.kv_bytes + plan.pools.state_bytes) * ranks
        found.append(f"the host tier takes up to {gib(tier)} of memory on each machine")
    if plan.pools is not None:
        asked = plan.workload
        old = max(asked.context - asked.turn_tokens, 0)
        kept, lost = prefill_bound_s(plan, old, asked.turn_tokens), prefill_bound_s(plan, 0, asked.context)
        found.append(
            f"a turn of {asked.turn_tokens} new tokens takes at least {kept * 1e3:.0f} ms of prefill, "
            f"{lost:.1f} s when its session was not kept ({asked.context} tokens at the dense FP8 peak)"
        )
        for requests in sorted({1, plan.workload.concurrent}):
            bound = decode_bound(plan, plan.workload.context, requests)
            found.append(
                f"a decode step of {requests} request(s) at {plan.workload.context} tokens takes at least "
                f"{bound.seconds * 1e3:.1f} ms: what it reads at {plan.gpu.bandwidth_bytes_s / 1e12:.2f} TB/s "
                f"({plan.gpu.source})"
            )
    return found


def as_json(plan: Plan, others: Sequence[Plan]) -> dict[str, Any]:
    """The chosen plan with everything in it, and the layouts it was compared with."""
    weights = None if plan.weights is None else {**asdict(plan.weights), "bytes": plan.weights.bytes}
    return {
        "model": {
            "name": plan.model.name,
            "checkpoint_bytes": checkpoint_bytes(plan.model.text, plan.model.vision_bytes),
        },
        "gpu": asdict(plan.gpu),
        "layout": asdict(plan.layout),
        "workload": asdict(plan.workload),
        "problems": list(plan.problems),
        "fits": plan.fits,
        "meets": plan.meets,
        "weights_per_gpu": weights,
        "overhead_bytes": plan.overhead_bytes,
        "memory_fraction": plan.memory_fraction,
        "kept_back_bytes": plan.kept_back_bytes,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "rest_bytes": plan.rest_bytes,
        "pools": None if plan.pools is None else asdict(plan.pools),
        "shortage": None if plan.shortage is None else asdict(plan.shortage),
        "concurrency": [asdict(row) for row in plan.rows],
        "settings": settings(plan),
        "notes": notes(plan),
        "compared": [
            {"layout": other.layout.text, "fits": other.fits, "meets": other.meets, "problems": list(other.problems)}
            for other in others
        ],
    }


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=True, title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _layouts(plans: Sequence[Plan], chosen: Plan) -> Table:
    table = _table("layouts", "", "weights per GPU", "KV tokens", "state slots", "requests at once", "sessions")
    for plan in plans:
        mark = " <" if plan.layout == chosen.layout else ""
        weights = "" if plan.weights is None else gib(plan.weights.bytes)
        here = plan.at_workload
        if plan.pools is None or here is None:
            why = f"lacks {gib(plan.shortage.missing_bytes)}" if plan.shortage is not None else "not possible"
            table.add_row(plan.layout.text + mark, weights, why, "", "", "")
            continue
        tokens = f"{plan.pools.kv_tokens * plan.layout.dcp * plan.layout.attn_dp:,}"
        counts = (plan.pools.state_slots * plan.layout.attn_dp, here.running, here.sessions)
        table.add_row(plan.layout.text + mark, weights, tokens, *map(str, counts))
    return table


def _memory(plan: Plan) -> Table:
    weights = plan.weights
    assert weights is not None
    table = _table("memory of the fullest GPU", "", "GiB")
    rows = [*((name, size) for name, size in sorted(weights.parts.items(), key=lambda item: -item[1]))]
    for name, size in rows:
        table.add_row(f"  {name}", f"{size / GIB:.2f}")
    table.add_row("weights", f"{weights.bytes / GIB:.2f}")
    table.add_row("in use before loading (assumed)", f"{plan.overhead_bytes / GIB:.2f}")
    table.add_row(f"kept back (memory fraction {plan.memory_fraction:.3f})", f"{plan.kept_back_bytes / GIB:.2f}")
    if plan.checkpoint_bytes:
        table.add_row("  of it the pool of checkpoints", f"{plan.checkpoint_bytes / GIB:.2f}")
    table.add_row("left for both pools", f"{plan.rest_bytes / GIB:.2f}")
    table.add_row("total", f"{plan.gpu.memory_bytes / GIB:.2f}")
    return table


def _pools(plan: Plan) -> Table:
    pools, layout = plan.pools, plan.layout
    assert pools is not None
    table = _table("pools of each rank", "", "size", "bytes of one", "GiB")
    tokens = f"{pools.kv_tokens:,} tokens" + (f" (x {layout.dcp} by DCP)" if layout.dcp > 1 else "")
    table.add_row("latents", tokens, f"{pools.bytes_per_token:,}", f"{pools.kv_bytes / GIB:.2f}")
    slots = f"{pools.state_slots:,} slots, {pools.slots_per_request} for a running request"
    table.add_row("states", slots, f"{pools.bytes_per_slot:,}", f"{pools.state_bytes / GIB:.2f}")
    if pools.draft_state_bytes:
        table.add_row("states of drafts", "", "", f"{pools.draft_state_bytes / GIB:.2f}")
    return table


def _concurrency(plan: Plan) -> Table:
    table = _table("over the deployment", "context", "by latents", "by states", "requests at once", "sessions kept")
    for row in plan.rows:
        table.add_row(
            f"{row.context // 1024}K", str(row.by_latents), str(row.by_states), str(row.running), str(row.sessions)
        )
    return table
