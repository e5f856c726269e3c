"""Cost of the prefix cache itself: matching, inserting, evicting, ours on SGLang's Python tree against its Rust core.

    python benchmarks/cache_operations.py                       # no engine, a few minutes
    python benchmarks/cache_operations.py --nodes 2000 --json out.json

Three caches with the same contents are asked the same things in turn: `rust` (SGLang's own, as it is without us),
`python` (SGLang's own components on its Python tree) and `k3` (ours on the Python tree). Contents: sessions of short
turns that share heads, a state at the end of every turn, `--nodes` in all, and one long prompt of each length, computed
in chunks.

- `match`: a prompt that is there but for 40 tokens at its end.
- `insert`: the same prompt with 40 more tokens and a state, as after a turn; the engine always gives the whole path.
- `evict state`, `evict KV`: room for one state, for 64 tokens of KV.

Figures are medians; the ratio is to `rust` in the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from k3_sglang import compat
from k3_sglang.cache.factory import components
from k3_sglang.cache.replay.budget import Budget
from k3_sglang.cache.replay.rig import UpstreamFlags, build_upstream

LENGTHS = (1_000, 100_000, 1_000_000)
CHUNK = 8192
TURN = 64
"""Tokens of a turn in the short sessions."""
TURNS = 100
"""Turns of a short session."""
TAIL = 40
HEADS, HEAD_TURNS = 5, 10
"""Beginnings shared by short sessions, and their length in turns."""
SPARE_KV = 20_000
VOCABULARY = 160_000


@dataclass(frozen=True)
class Figure:
    """One operation on one cache."""

    cache: str
    operation: str
    prompt_tokens: int
    nodes: int
    median_us: float
    p95_us: float


class Cache:
    """One of the three caches with the calls the engine would make."""

    def __init__(self, name: str, budget: Budget) -> None:
        self.name = name
        kinds = compat.ComponentType
        own = {kinds.FULL: compat.FullComponent, kinds.MAMBA: compat.MambaComponent}
        classes = {"rust": None, "python": own, "k3": components()}[name]
        rig = build_upstream(budget, UpstreamFlags(extra_buffer=False), classes, context_len=64)
        self.tree, self.rows = rig.cache, rig.req_to_token_pool
        self.kv = rig.cache.token_to_kv_pool_allocator
        self.index = getattr(rig.cache.components[kinds.MAMBA], "index", None)

    def match(self, path: array[int]) -> Any:
        """Longest usable prefix."""
        return self.tree.match_prefix(compat.MatchPrefixParams(key=compat.RadixKey(path)))

    def insert(self, path: array[int]) -> Callable[[], None]:
        """Match and allocate now, as the engine has done long before; returns the insertion itself."""
        found = self.match(path)
        known = found.device_prefix_len
        core, last = self.tree.tree_core, found.last_device_node
        prefix = core.collect_full_device_indices(last, core.root_node_handle(None)) if known else None
        new = self.kv.alloc(len(path) - known)
        slot = self.rows.mamba_allocator.alloc(1)
        assert new is not None and slot is not None, "the pools are too small for this benchmark"
        value = new if prefix is None else torch.cat([prefix, new])
        key = compat.RadixKey(path)

        def commit() -> None:
            if self.index is not None:
                self.index.begin_request(None)
            result = self.tree.insert(
                compat.InsertParams(key=key, value=value, mamba_value=slot, prev_prefix_len=known)
            )
            if result.mamba_exist:
                self.rows.mamba_allocator.free(slot)

        return commit

    def evict(self, tokens: int, states: int) -> None:
        """Free at least so much."""
        self.tree.evict(compat.EvictParams(num_tokens=tokens, mamba_num=states))

    def nodes(self) -> int:
        """States held."""
        return int(self.tree.mamba_evictable_size())


def fill(cache: Cache, nodes: int, long_prompts: dict[int, array[int]], seed: int) -> None:
    """The contents described above."""
    source = random.Random(seed)
    heads = [tokens(source, HEAD_TURNS * TURN) for _ in range(HEADS)]
    while cache.nodes() < nodes:
        path = heads[source.randrange(len(heads))] + tokens(source, TURN)
        for _ in range(min(TURNS, nodes - cache.nodes())):
            cache.insert(path)()
            path = path + tokens(source, TURN)
    for prompt in long_prompts.values():
        for end in range(min(CHUNK, len(prompt)), len(prompt) + CHUNK, CHUNK):
            cache.evict(0, 1)
            cache.insert(prompt[:end])()


def tokens(source: random.Random, count: int) -> array[int]:
    """Random ids."""
    return array("q", source.choices(range(VOCABULARY), k=count))


def timed(call: Callable[[], Any]) -> float:
    """Microseconds of this thread: nothing here waits, and other programs on the machine do not count."""
    start = time.thread_time()
    call()
    return (time.thread_time() - start) * 1e6


def measure(caches: Sequence[Cache], prompts: dict[int, array[int]], repetitions: int) -> list[Figure]:
    """Every operation on every cache in turn."""
    source = random.Random(2)
    samples: dict[tuple[str, str, int], list[float]] = {}
    for length, prompt in prompts.items():
        for _ in range(repetitions):
            for cache in caches:
                for each in prompts.values():  # asked for again and again, or they would soon be the oldest
                    found = cache.match(each).device_prefix_len
                    assert found == len(each), f"{cache.name} holds {found} of {len(each)} tokens"
            tail = tokens(source, TAIL)
            for cache in caches:
                taken = {"match": timed(lambda: cache.match(prompt[:-1] + tail))}  # noqa: B023 - called at once
                commit = cache.insert(prompt + tail)
                taken["insert"] = timed(commit)
                taken["evict state"] = timed(lambda: cache.evict(0, 1))  # noqa: B023
                taken["evict KV"] = timed(lambda: cache.evict(TURN, 0))  # noqa: B023
                for operation, microseconds in taken.items():
                    samples.setdefault((cache.name, operation, length), []).append(microseconds)
    figures = []
    for (name, operation, length), values in samples.items():
        nodes = next(cache.nodes() for cache in caches if cache.name == name)
        p95 = statistics.quantiles(values, n=20)[-1]
        figures.append(Figure(name, operation, length, nodes, statistics.median(values), p95))
    return figures


def show(figures: Sequence[Figure], names: Sequence[str]) -> None:
    """Print the table."""
    table = Table(title="microseconds per operation: median (95th percentile), and ratio to rust")
    for column in ("operation", "prompt", *names):
        table.add_column(column, justify="left" if column == "operation" else "right")
    by_key = {(figure.operation, figure.prompt_tokens, figure.cache): figure for figure in figures}
    for operation, length in dict.fromkeys((figure.operation, figure.prompt_tokens) for figure in figures):
        first = by_key[operation, length, names[0]].median_us
        row = [by_key[operation, length, name] for name in names]
        cells = [f"{each.median_us:,.0f} ({each.p95_us:,.0f}) x{each.median_us / first:.1f}" for each in row]
        table.add_row(operation, f"{length:,}", *cells)
    Console(width=120).print(table)


def main() -> int:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000, help="states in the tree (default: 10000)")
    parser.add_argument("--repetitions", type=int, default=200, help="of every operation (default: 200)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of the prompts")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Little is free: the pool's own free list costs time in proportion to its length, whatever the tree.
    kv_tokens = (arguments.nodes + HEADS * HEAD_TURNS) * TURN + sum(arguments.lengths) + SPARE_KV
    budget = Budget(arguments.nodes + 64, kv_tokens, state_bytes=1, kv_token_bytes=1, grain=1)
    source = random.Random(1)
    prompts = {length: tokens(source, length) for length in arguments.lengths}
    caches = [Cache(name, budget) for name in ("rust", "python", "k3")]
    for cache in caches:
        fill(cache, arguments.nodes, prompts, seed=3)
    figures = measure(caches, prompts, arguments.repetitions)
    show(figures, [cache.name for cache in caches])
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(figure) for figure in figures], indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
