"""The whole table of replayed cells with one command; every finished row is appended, so that a stop loses nothing.

    python benchmarks/cache_sweep.py coding-agent-sessions.jsonl.gz --out sweep.jsonl
    python benchmarks/cache_sweep.py mooncake-conversation.jsonl.gz --out mooncake.jsonl
    python benchmarks/cache_sweep.py --table sweep.jsonl

Rows already in the file are not run again. By default ``k3`` and ``upstream`` run on the light trees (same hits as the
real cache, see docs/cache-replay.md); ``--real`` uses SGLang's own.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3_sglang.cache.replay import policies
from k3_sglang.cache.replay.bound import find_options
from k3_sglang.cache.replay.budget import Budget, rank_bytes
from k3_sglang.cache.replay.driver import BudgetError
from k3_sglang.cache.replay.flops import PromptCost, Speed
from k3_sglang.cache.replay.release import RELEASE_TEXT
from k3_sglang.cache.replay.report import make_row
from k3_sglang.cache.replay.schedule import Pacing, Step, make_steps
from k3_sglang.cache.replay.traces import Trace, read_trace

BUDGETS = ((3, 190_000), (6, 190_000), (10, 190_000), (20, 190_000), (20, 600_000))
"""State slots and KV tokens per open session, from scarce to ample."""
MOONCAKE_BUDGETS = ((64, 1_000_000), (128, 1_000_000), (256, 2_000_000), (1024, 8_000_000))
"""State slots and KV tokens in all: the trace has no sessions."""
POLICIES = ("k3", "k3:hints", "upstream", "upstream-best", "bound", "vllm-align", "marconi", "tokenspeed")
UNLIMITED = {"states": 10**5, "kv_tokens": 10**10}
"""Rows named ``k3+states`` and so on: the cache with this resource unlimited, to see what the other one costs."""
CAPS = (1, 2, 3, 5)
INTERVALS = (256, 64)


@dataclass(frozen=True)
class Work:
    """One cell of the table."""

    concurrent: int
    states: int
    kv_tokens: int

    def key(self, policy: str) -> tuple[Any, ...]:
        """What names a row in the file."""
        return self.concurrent, self.states, self.kv_tokens, policy


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?", help="trace file")
    parser.add_argument("--out", type=Path, default=Path("sweep.jsonl"), help="rows are appended here")
    parser.add_argument("--table", type=Path, help="print the table of such a file and end")
    parser.add_argument("--concurrent", default="8,16,32", help="sessions open at a time (default 8,16,32)")
    parser.add_argument("--policies", default=",".join(POLICIES), help="default: %(default)s")
    parser.add_argument("--half", choices=("all", "even", "odd"), default="all", help="sessions by place in the file")
    parser.add_argument("--sessions", type=int, help="so many sessions of them; default all")
    parser.add_argument("--max-requests", type=int, help="cut every session after this many requests")
    parser.add_argument("--seed", type=int, default=1, help="order of the sessions")
    parser.add_argument("--real", action="store_true", help="SGLang's own tree for k3 and upstream; 20 times slower")
    return parser.parse_args(argv)


def chosen(trace: Trace, half: str) -> Trace:
    """The sessions at even or odd places of the file, or all."""
    begin, step = {"all": (0, 1), "even": (0, 2), "odd": (1, 2)}[half]
    return Trace(trace.format, trace.sessions[begin::step], trace.shared_ids)


def cells(trace: Trace, concurrent: str) -> Iterator[Work]:
    """The cells of a trace, scarce memory first."""
    if trace.format == "mooncake":
        for states, kv_tokens in MOONCAKE_BUDGETS:
            yield Work(0, states, kv_tokens)
        return
    for count in (int(part) for part in concurrent.split(",")):
        for states, kv_tokens in BUDGETS:
            yield Work(count, states * count, kv_tokens * count)


def run_row(work: Work, policy: str, steps: list[Step], options: Any, real: bool) -> dict[str, Any]:
    """Replay one policy in one cell."""
    # Attention data parallelism: neither states nor latents are sharded; the scarcest case for states.
    state, kv = rank_bytes(RELEASE_TEXT, tp=8, state_dtype_bytes=4, kv_dtype_bytes=2, attention_dp=True)
    budget = Budget(work.states, work.kv_tokens, state, kv)
    name, _, unlimited = policy.partition("+")
    if unlimited:
        budget = replace(budget, **{key: UNLIMITED[key] for key in unlimited.split("+")})
    cost = PromptCost.of(RELEASE_TEXT)
    cell = policies.Cell(steps, budget, False, cost, CAPS, INTERVALS, light=not real)
    begun = time.monotonic()
    row = make_row(policies.run(name, cell, options), cell, Speed(1e15 * 0.4 * 8), time.monotonic() - begun)
    return {
        "concurrent": work.concurrent, "states": work.states, "kv_tokens": work.kv_tokens, "policy": policy,
        "real": real, "requests": row.requests, "prompt": row.prompt_tokens, "computed": row.computed_tokens,
        "no_state": row.state_missing_tokens, "exaflop": row.flops and row.flops / 1e18, "detail": row.detail,
        "ttft_mean_s": row.first_token and row.first_token.mean, "ttft_p95_s": row.first_token and row.first_token.p95,
        "seconds": row.seconds,
    }  # fmt: skip


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows of a file; a line cut by a stop is left out."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{path}: a line that is not JSON is left out", file=sys.stderr)
    return rows


def sweep(args: argparse.Namespace) -> None:
    """All cells and policies that the file does not have yet; policies in the outer loop, so that columns fill up."""
    trace = chosen(read_trace(args.trace), args.half)
    done = {Work(r["concurrent"], r["states"], r["kv_tokens"]).key(r["policy"]) for r in rows_of(args.out)}
    loads: dict[int, tuple[list[Step], Any]] = {}
    for policy in args.policies.split(","):
        for work in cells(trace, args.concurrent):
            if work.key(policy) in done:
                continue
            if work.concurrent not in loads:
                pacing = Pacing(max(work.concurrent, 1))
                steps = make_steps(
                    trace, pacing, seed=args.seed, sessions=args.sessions, max_requests=args.max_requests
                )
                loads[work.concurrent] = steps, find_options(steps, 64)
            try:
                row = run_row(work, policy, *loads[work.concurrent], args.real)
            except BudgetError as error:
                print(f"{work} {policy}: no row, {error}", file=sys.stderr, flush=True)
                continue
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{work} {policy}: {row['computed'] / 1e6:.2f} M in {row['seconds']:.0f} s", flush=True)


def table(path: Path) -> str:
    """Markdown: a line per cell, computed tokens in millions, and where an aim is missed."""
    by_cell: dict[tuple[int, int, int], dict[str, dict[str, Any]]] = {}
    for row in rows_of(path):
        by_cell.setdefault((row["concurrent"], row["states"], row["kv_tokens"]), {})[row["policy"]] = row
    names = list(dict.fromkeys(name for rows in by_cell.values() for name in rows))
    head = ["open", "states", "KV M", *names, "default / hints", "best flags / k3", "k3, hints / bound"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for (concurrent, states, kv_tokens), rows in by_cell.items():
        value = {name: row["computed"] / 1e6 for name, row in rows.items()}
        texts = [str(concurrent or "-"), str(states), f"{kv_tokens / 1e6:.2f}"]
        texts += [f"{value[name]:.1f}" if name in value else "" for name in names]
        texts += [
            _ratio(value, "upstream", "k3:hints"),
            _ratio(value, "upstream-best", "k3"),
            f"{_ratio(value, 'k3', 'bound')}, {_ratio(value, 'k3:hints', 'bound')}",
        ]
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _ratio(value: dict[str, float], above: str, below: str) -> str:
    return f"{value[above] / value[below]:.2f}" if above in value and below in value else "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Run or print; 130 after Ctrl-C."""
    args = parse(argv)
    warnings.filterwarnings("ignore", module="sglang")
    logging.getLogger("sglang").setLevel(logging.ERROR)
    if args.table is not None:
        print(table(args.table))
        return 0
    if args.trace is None:
        print("give a trace file, or --table FILE", file=sys.stderr)
        return 2
    try:
        sweep(args)
    except KeyboardInterrupt:
        print(f"stopped; finished rows are in {args.out}, the same command goes on from there", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
