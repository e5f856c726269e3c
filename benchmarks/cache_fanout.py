"""Sub-agents that start together on a head nobody has computed: how often is the head computed?

    python benchmarks/cache_fanout.py                        # two engine starts, about two minutes
    python benchmarks/cache_fanout.py --agents 8 --head 4000 --json out.json

Each sub-agent's prompt is the head and a few tokens of its own; all are sent at once. `times` are the head's tokens
that went through the model over the head's length: 1 is the least. Every repetition has another head.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from cache_common import VOCABULARY, Engine, Pools, engine
from rich.console import Console
from rich.table import Table

OWN_TOKENS = (30, 80)
"""Least and most tokens of a sub-agent's own task."""


@dataclass(frozen=True)
class FanOut:
    """One repetition."""

    cache: str
    head_computed_tokens: int
    ttft_last_s: float
    """Until the slowest sub-agent's first token."""


def fan_out(server: Engine, cache: str, agents: int, head_len: int, seed: int) -> FanOut:
    """Send all at once, on an empty cache."""
    source = random.Random(seed)
    head = source.choices(range(VOCABULARY), k=head_len)
    prompts = [head + source.choices(range(VOCABULARY), k=source.randint(*OWN_TOKENS)) for _ in range(agents)]
    server.flush()
    with ThreadPoolExecutor(agents) as pool:
        answers = list(pool.map(lambda ids: server.answer(ids, [7] * 8), prompts))
    head_computed = sum(max(0, head_len - answer.cached_tokens) for answer in answers)
    return FanOut(cache, head_computed, max(answer.ttft_s for answer in answers))


def show(runs: Sequence[FanOut], head_len: int, agents: int) -> None:
    """Print medians; the ratio is to the first cache."""
    table = Table(title=f"{agents} sub-agents at once on an uncached head of {head_len:,} tokens")
    for name in ("cache", "head tokens computed", "times", "slowest first token", "ratio"):
        table.add_column(name, justify="left" if name == "cache" else "right")
    reference = statistics.median(run.ttft_last_s for run in runs if run.cache == runs[0].cache)
    for cache in dict.fromkeys(run.cache for run in runs):
        own = [run for run in runs if run.cache == cache]
        tokens = statistics.median(run.head_computed_tokens for run in own)
        seconds = statistics.median(run.ttft_last_s for run in own)
        cells = (f"{tokens:,.0f}", f"{tokens / head_len:.2f}", f"{seconds:.2f} s", f"{seconds / reference:.2f}")
        table.add_row(cache, *cells)
    Console().print(table)


def main() -> int:
    """Both caches in turn, several repetitions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=8, help="sub-agents (default: 8)")
    parser.add_argument("--head", type=int, default=4000, help="tokens of the common head (default: 4000)")
    parser.add_argument("--slots", type=int, default=64, help="state slots (default: 64)")
    parser.add_argument("--chunk", type=int, default=2048, help="most tokens of a prefill step (default: 2048)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write every run to this file")
    arguments = parser.parse_args()
    pools = Pools(65536, arguments.slots, arguments.agents, arguments.chunk)
    runs: list[FanOut] = []
    with contextlib.ExitStack() as stack:
        servers = {cache: stack.enter_context(engine(cache, pools)) for cache in ("sglang", "k3")}
        for server in servers.values():
            server.answer(list(range(64)), [1] * 4)  # the first request compiles and allocates
        for seed in range(arguments.repetitions):
            runs += [fan_out(each, cache, arguments.agents, arguments.head, seed) for cache, each in servers.items()]
    show(runs, arguments.head, arguments.agents)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(run) for run in runs], indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
