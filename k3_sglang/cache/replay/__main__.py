"""``python -m k3_sglang.cache.replay``: replay a trace through prefix caches and compare what they compute again."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from k3_sglang.cache.replay import policies
from k3_sglang.cache.replay.bound import find_options
from k3_sglang.cache.replay.budget import Budget, rank_bytes
from k3_sglang.cache.replay.driver import BudgetError
from k3_sglang.cache.replay.flops import PromptCost, Speed
from k3_sglang.cache.replay.release import RELEASE_TEXT
from k3_sglang.cache.replay.report import Row, make_row, make_table, to_json
from k3_sglang.cache.replay.schedule import Pacing, make_steps
from k3_sglang.cache.replay.traces import TraceError, read_trace

EXAMPLES = """\
examples:
  # eight open sessions, 24 and 40 state slots, SGLang's cache against the models and the bound
  python -m k3_sglang.cache.replay coding-agent-sessions.jsonl.gz --sessions 40 --concurrent 8 --states 24,40
  # three budgets per open session, SGLang's flags searched more widely, results to a file
  python -m k3_sglang.cache.replay coding-agent-sessions.jsonl.gz --sessions 40 --concurrent 16 \\
      --states-per-session 3,6,9 --policies upstream,upstream-best,bound --search-caps 1,2,3,5,8 --json table.json
  # a component of your own on SGLang's tree, exact to the token
  python -m k3_sglang.cache.replay trace.jsonl --sessions 4 --states 16 --grain 1 \\
      --policies upstream,component:my.module:MyComponent
  # an open stream of requests at their recorded times
  python -m k3_sglang.cache.replay mooncake-conversation.jsonl.gz --sessions 2000 --states 64 --kv-tokens 1000000

policies:
"""


def _numbers(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(",") if part)
    if not values or min(values) < 1:
        raise ValueError
    return values


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m k3_sglang.cache.replay",
        description="Replay recorded requests through prefix caches and count what each computes again.",
        epilog=EXAMPLES + "".join(f"  {line}\n" for line in policies.HELP.splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, help="trace file, JSON lines, plain or .gz (formats: docs/cache-replay.md)")
    parser.add_argument("--policies", default=policies.DEFAULT, help="comma separated names; default: %(default)s")
    load = parser.add_argument_group("load")
    load.add_argument("--sessions", type=int, help="sessions drawn from the trace, or its first requests; default: all")
    load.add_argument("--max-requests", type=int, help="cut every session after this many requests")
    load.add_argument("--concurrent", type=_numbers, default=(8,), help="sessions open at a time, one cell each: 8,16")
    load.add_argument("--seed", type=int, default=1, help="which sessions are drawn, in which order (default 1)")
    load.add_argument("--max-gap", type=float, default=3600.0, help="longest pause in a session, s (default 3600)")
    load.add_argument("--serial", action="store_true", help="finish a request before the next begins")
    memory = parser.add_argument_group("memory of one rank")
    memory.add_argument("--states", type=_numbers, help="state slots in all, one cell each: 24,40,80")
    memory.add_argument("--states-per-session", type=_numbers, help="state slots per open session, one cell each")
    memory.add_argument("--kv-tokens", type=int, help="KV pool in tokens; default: 190000 per open session")
    memory.add_argument("--tp", type=int, default=8, help="tensor parallel ranks (default 8)")
    memory.add_argument("--attention-dp", action="store_true", help="states are not sharded over the ranks")
    memory.add_argument("--state-dtype", choices=("fp32", "bf16"), default="fp32", help="default fp32")
    memory.add_argument("--kv-dtype", choices=("bf16", "fp8"), default="bf16", help="default bf16")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--page", type=int, default=1, help="page of the KV pool in tokens (default 1)")
    engine.add_argument("--chunk", type=int, default=16384, help="longest prefill chunk (default 16384)")
    engine.add_argument("--grain", type=int, choices=(1, 64), default=64, help="tokens per tree key (default 64)")
    engine.add_argument(
        "--light", action="store_true", help="k3 and upstream on a tree of our own: same hits, faster (page 1)"
    )
    engine.add_argument("--search-caps", type=_numbers, default=(1, 2, 3, 5), help="path caps of upstream-best")
    engine.add_argument("--search-intervals", type=_numbers, default=(256,), help="decode intervals of upstream-best")
    engine.add_argument("--device-flops", type=float, default=1e15, help="peak of one device, FLOP/s (default 1e15)")
    engine.add_argument("--utilisation", type=float, default=0.4, help="share of it reached in prefill (default 0.4)")
    parser.add_argument("--json", type=Path, help="write all results here")
    return parser


def _budgets(args: argparse.Namespace, concurrent: int) -> list[Budget]:
    state, kv = rank_bytes(
        RELEASE_TEXT,
        tp=args.tp,
        state_dtype_bytes=4 if args.state_dtype == "fp32" else 2,
        kv_dtype_bytes=2 if args.kv_dtype == "bf16" else 1,
        attention_dp=args.attention_dp,
    )
    slots = [*(args.states or ()), *(each * concurrent for each in args.states_per_session or ())]
    tokens = args.kv_tokens or 190_000 * concurrent
    return [Budget(count, tokens, state, kv, args.grain, args.page, args.chunk) for count in slots]


def _check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    if not (args.states or args.states_per_session):
        parser.error("say how many state slots there are: --states or --states-per-session")
    names = _policy_names(args.policies)
    try:
        for name in names:
            policies.check(name)
    except policies.PolicyError as error:
        parser.error(str(error))
    return names


def _policy_names(text: str) -> list[str]:
    """Names at the commas, except commas inside ``upstream:...``'s flags."""
    names: list[str] = []
    for part in text.split(","):
        flag = part == "no_buffer" or part.partition("=")[0] in ("cap", "interval")
        if flag and names and names[-1].startswith("upstream:"):
            names[-1] += f",{part}"
        elif part:
            names.append(part)
    return names


def _title(cell: policies.Cell, load: str) -> str:
    budget, total = cell.budget, sum(step.prompt_tokens for step in cell.steps)
    return (
        f"{load}, {budget.states} state slots, {budget.kv_tokens:,} KV tokens "
        f"({budget.total_bytes / 1e9:.1f} GB a rank): {len(cell.steps)} requests, {total / 1e6:.1f} M prompt tokens"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0, 2 for wrong input, 130 after Ctrl-C."""
    parser = make_parser()
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", module="sglang")
    logging.getLogger("sglang").setLevel(logging.ERROR)
    names = _check(args, parser)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    done: list[tuple[dict[str, Any], list[Row]]] = []
    complete = False
    try:
        _run_cells(args, names, console, done)
        complete = True
    except KeyboardInterrupt:
        console.print("stopped; what was finished is above" + (f" and in {args.json}" if args.json else ""))
    except (TraceError, BudgetError) as error:
        console.print(f"error: {error}", markup=False, style="red")
        return 2
    finally:
        if args.json is not None and done:
            settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
            args.json.write_text(json.dumps(to_json(done, settings, complete), indent=1) + "\n", encoding="utf-8")
    return 0 if complete else 130


def _run_cells(
    args: argparse.Namespace, names: list[str], console: Console, done: list[tuple[dict[str, Any], list[Row]]]
) -> None:
    trace = read_trace(args.trace)
    speed = Speed(args.device_flops * args.utilisation * args.tp)
    cost = PromptCost.of(RELEASE_TEXT)
    console.print(
        f"TTFT: prefill only, no queueing; {args.tp} devices x {args.device_flops:.2g} FLOP/s x {args.utilisation} "
        f"and {speed.chunk_overhead_s * 1000:.0f} ms per pass",
        highlight=False,
    )
    recorded_times = trace.format == "mooncake"
    for concurrent in args.concurrent[:1] if recorded_times else args.concurrent:
        load = "recorded arrivals" if recorded_times else f"{concurrent} open sessions"
        pacing = Pacing(concurrent, args.max_gap, args.serial)
        steps = make_steps(trace, pacing, seed=args.seed, sessions=args.sessions, max_requests=args.max_requests)
        options = find_options(steps, args.grain) if set(names) & set(policies.BOUNDS) else None
        for budget in _budgets(args, concurrent):
            cell = policies.Cell(steps, budget, args.serial, cost, args.search_caps, args.search_intervals, args.light)
            rows: list[Row] = []
            done.append(({"concurrent": concurrent, "budget": asdict(budget)}, rows))
            title = _title(cell, load)
            try:
                _run_policies(names, cell, options, speed, console, rows)
            finally:
                if rows:
                    console.print(make_table(title, rows))


def _run_policies(
    names: list[str], cell: policies.Cell, options: Any, speed: Speed, console: Console, rows: list[Row]
) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for name in names:
            total = policies.passes(name, cell) * len(cell.steps)
            task = progress.add_task(name, total=total or None)
            begun = time.monotonic()
            outcome = policies.run(name, cell, options, lambda task=task: progress.advance(task))
            rows.append(make_row(outcome, cell, speed, time.monotonic() - begun))
            progress.remove_task(task)


if __name__ == "__main__":
    sys.exit(main())
