"""Scripted agent sessions under a small state pool: how much is computed, and how long until the first token?

    python benchmarks/cache_engine.py               # 12 sessions at a time, about ten minutes on an idle machine
    python benchmarks/cache_engine.py --slots 24 --json out.json

Two engines with the same pools run the same requests in the same order, one engine at a time, several repetitions in
turn: `k3` (the checkpoint cache without any hint), `k3 hinted` (the same engine, told session, head, wait and end) and
`sglang` (SGLang's own cache). A request is sent as soon as those it continues are answered, the one before it in the
script has been sent, and fewer than `--in-flight` are running. Caches are flushed before each run.

`computed` are prompt tokens that went through the model; `ideal` is what a cache with a state at every token and
without limits would compute. Times are only worth something on an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cache_common import Answer, Engine, Pools, engine, percentile
from cache_sessions import Script, Step
from rich.console import Console
from rich.table import Table

SCRIPTED_SECOND = 2.0
"""Seconds a unit of scripted time stands for in hints."""


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    engine: str
    """Which of the started engines."""
    hinted: bool = False


@dataclass(frozen=True)
class Run:
    """One repetition of one variant."""

    variant: str
    computed_tokens: int
    ttft_p50_s: float
    ttft_p95_s: float


def run(server: Engine, script: Script, variant: Variant, in_flight: int) -> Run:
    """All requests of the script once, on an empty cache."""
    server.flush()
    answers: dict[int, Answer] = {}
    done = {id(step): threading.Event() for step in script.requests}
    free = threading.Semaphore(in_flight)
    failed = threading.Event()

    def send(step: Step) -> None:
        try:
            hints = step.hints(SCRIPTED_SECOND) if variant.hinted else None
            answers[id(step)] = server.answer(step.prompt, step.answer, hints)
        except BaseException:
            failed.set()
            raise
        finally:
            done[id(step)].set()
            free.release()

    with ThreadPoolExecutor(in_flight) as pool:
        sent = []
        for step in script.requests:
            for before in step.after:
                done[id(before)].wait()
            free.acquire()
            if failed.is_set():
                break
            sent.append(pool.submit(send, step))
        for future in sent:
            future.result()
    times = [answer.ttft_s for answer in answers.values()]
    computed = sum(answer.computed_tokens for answer in answers.values())
    return Run(variant.name, computed, percentile(times, 0.5), percentile(times, 0.95))


def variants_of(arguments: argparse.Namespace) -> list[Variant]:
    """The rows that were asked for."""
    rows = [Variant("sglang", "sglang"), Variant("k3", "k3"), Variant("k3 hinted", "k3", hinted=True)]
    if arguments.path_cap is not None:
        rows.append(Variant(f"sglang, cap {arguments.path_cap}", "capped"))
    return rows


def measure(arguments: argparse.Namespace, script: Script) -> list[Run]:
    """Start the engines, run everything in turn."""
    variants = variants_of(arguments)
    pools = Pools(arguments.kv_tokens, arguments.slots, arguments.in_flight, arguments.chunk)
    runs: list[Run] = []
    with contextlib.ExitStack() as stack:
        servers: dict[str, Engine] = {}
        for name in dict.fromkeys(variant.engine for variant in variants):
            capped = Pools(**{**vars(pools), "further": {"mamba-max-states-per-path": arguments.path_cap}})
            settings = ("sglang", capped) if name == "capped" else (name, pools)
            servers[name] = stack.enter_context(engine(*settings))
            servers[name].answer(list(range(64)), [1] * 4)  # the first request compiles and allocates
        for repetition in range(arguments.repetitions):
            shift = repetition % len(variants)
            for variant in variants[shift:] + variants[:shift]:
                runs.append(run(servers[variant.engine], script, variant, arguments.in_flight))
                print(f"repetition {repetition + 1}: {runs[-1]}", file=sys.stderr)
    return runs


def summary(runs: Sequence[Run], ideal: int) -> list[dict[str, Any]]:
    """Medians per variant, and ratios to ``sglang`` of the medians of paired repetitions."""

    def column(variant: str, name: str) -> list[float]:
        return [getattr(each, name) for each in runs if each.variant == variant]

    rows = []
    for variant in dict.fromkeys(each.variant for each in runs):
        row: dict[str, Any] = {"variant": variant}
        for name in ("computed_tokens", "ttft_p50_s", "ttft_p95_s"):
            values, others = column(variant, name), column("sglang", name)
            row[name] = statistics.median(values)
            row[f"{name}_range"] = [min(values), max(values)]
            row[f"{name}_ratio"] = statistics.median(a / b for a, b in zip(values, others, strict=True))
        row["over_ideal"] = row["computed_tokens"] / ideal
        rows.append(row)
    return sorted(rows, key=lambda row: row["variant"] != "sglang")


def show(rows: Sequence[dict[str, Any]], title: str) -> None:
    """Print the table; ratios are to SGLang's own cache."""
    table = Table(title=title, caption="ratios are to SGLang's own cache in the same repetition, median of repetitions")
    for name in ("cache", "computed tokens", "(range)", "over ideal", "ratio", "TTFT p50", "ratio", "p95", "ratio"):
        table.add_column(name, justify="left" if name == "cache" else "right")
    for row in rows:
        low, high = row["computed_tokens_range"]
        cells = [row["variant"], f"{row['computed_tokens']:,.0f}", f"{low:,}-{high:,}", f"{row['over_ideal']:.2f}"]
        cells.append(f"{row['computed_tokens_ratio']:.2f}")
        for name in ("ttft_p50_s", "ttft_p95_s"):
            cells += [f"{row[name] * 1e3:,.0f} ms", f"{row[f'{name}_ratio']:.2f}"]
        table.add_row(*cells)
    Console(width=120).print(table)


def main() -> int:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=36, help="state slots (default: 36, three per session)")
    parser.add_argument("--kv-tokens", type=int, default=49152, help="KV pool in tokens (default: 49152)")
    parser.add_argument("--concurrent", type=int, default=12, help="sessions open at a time (default: 12)")
    parser.add_argument("--sessions", type=int, default=18, help="sessions in all; one opens when one closes")
    parser.add_argument("--steps", type=int, default=14, help="turns of a session, on average (default: 14)")
    parser.add_argument("--in-flight", type=int, default=4, help="requests running at once (default: 4)")
    parser.add_argument("--chunk", type=int, default=1024, help="most tokens of a prefill step (default: 1024)")
    parser.add_argument("--seed", type=int, default=1, help="of the script (default: 1)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--path-cap", type=int, help="also SGLang's cache with --mamba-max-states-per-path")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    arguments = parser.parse_args()
    script = Script(arguments.seed, arguments.concurrent, arguments.sessions, arguments.steps)
    ideal = script.ideal_tokens()
    runs = measure(arguments, script)
    rows = summary(runs, ideal)
    title = (
        f"{len(script.requests)} requests, {script.prompt_tokens:,} prompt tokens, ideal {ideal:,} computed; "
        f"{arguments.concurrent} sessions at a time, {arguments.slots} slots, {arguments.kv_tokens:,} tokens of KV"
    )
    show(rows, title)
    if arguments.json:
        options = {name: value for name, value in vars(arguments).items() if name != "json"}
        load = {"requests": len(script.requests), "prompt_tokens": script.prompt_tokens, "ideal_tokens": ideal}
        result = {"options": options, "load": load, "rows": rows, "runs": [asdict(each) for each in runs]}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
