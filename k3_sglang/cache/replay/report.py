"""Outcomes as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from k3_sglang.cache.replay.flops import Speed, Times
from k3_sglang.cache.replay.policies import Cell, Outcome


@dataclass(frozen=True)
class Row:
    """One policy in one cell."""

    policy: str
    detail: str
    requests: int
    prompt_tokens: int
    hit_tokens: float
    computed_tokens: float
    computed_at_most: float | None
    state_missing_tokens: int | None
    """Computed although their KV was there: what the lack of a state cost."""
    flops: float | None
    first_token: Times | None
    seconds: float
    """Time the replay itself took."""


def make_row(outcome: Outcome, cell: Cell, speed: Speed, seconds: float) -> Row:
    """Totals of one outcome. FLOPs and times need the single requests, which a bound does not have."""
    total = sum(step.prompt_tokens for step in cell.steps)
    served, cost = outcome.served, cell.cost
    return Row(
        policy=outcome.policy,
        detail=outcome.detail,
        requests=len(cell.steps),
        prompt_tokens=total,
        hit_tokens=total - outcome.computed_tokens,
        computed_tokens=outcome.computed_tokens,
        computed_at_most=outcome.computed_at_most,
        state_missing_tokens=sum(one.kv_hit_tokens - one.hit_tokens for one in served) if served else None,
        flops=sum(cost.span(one.hit_tokens, one.prompt_tokens) for one in served) if served else None,
        first_token=Times.of([cost.first_token_s(one, speed) for one in served]) if served else None,
        seconds=seconds,
    )


def make_table(title: str, rows: Sequence[Row]) -> Table:
    """A table of one cell; ratios are against ``bound``, or the smallest row when it is missing."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("cache", no_wrap=True)
    for name in ("hit M", "computed M", "of bound", "no state M", "EFLOP", "TTFT s", "p50", "p95"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note")
    bounds = [row.computed_tokens for row in rows if row.policy == "bound"]
    least = bounds[0] if bounds else min((row.computed_tokens for row in rows), default=0.0)
    for row in rows:
        times = row.first_token
        table.add_row(
            row.policy,
            f"{row.hit_tokens / 1e6:.2f}",
            f"{row.computed_tokens / 1e6:.2f}",
            f"{row.computed_tokens / least:.2f}" if least else "-",
            f"{row.state_missing_tokens / 1e6:.2f}" if row.state_missing_tokens is not None else "-",
            f"{row.flops / 1e18:.2f}" if row.flops is not None else "-",
            *([f"{value:.2f}" for value in (times.mean, times.p50, times.p95)] if times else "---"),
            row.detail,
        )
    return table


def to_json(cells: Sequence[tuple[dict[str, Any], Sequence[Row]]], settings: dict[str, Any], complete: bool) -> Any:
    """Everything the tables show, with the settings that produce it again."""
    return {
        "settings": settings,
        "complete": complete,
        "cells": [{**cell, "rows": [asdict(row) for row in rows]} for cell, rows in cells],
    }
