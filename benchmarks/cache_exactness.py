"""Greedy tokens of requests that reuse checkpoints against those of cold runs, in every mode of the checkpoint cache.

    python benchmarks/cache_exactness.py                      # 300 comparisons, three engine starts
    python benchmarks/cache_exactness.py --comparisons 3000 --json out.json

Sessions share a head, fork and grow; four run at a time in pools that hold a third of them, so checkpoints are made,
dropped and reused all the while. Ends with 1 when any answer differs, or the engine says that index, tree and pools
disagree. Tokens of cold and warm runs may part where two scores are equal to about 1e-7 (docs/engine.md).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from cache_common import VOCABULARY, Engine, Pools, engine
from rich.console import Console
from rich.progress import track
from rich.table import Table

NEW_TOKENS = 16
CONCURRENT = 4


@dataclass(frozen=True)
class Mode:
    """One way to run the engine."""

    name: str
    page_size: int
    overlap: str


MODES = (
    Mode("pages of one token", 1, "off"),
    Mode("overlapped steps", 1, "on"),
    Mode("overlapped steps, pages of 64", 64, "on"),
)


@dataclass(frozen=True)
class Result:
    """What one mode gave."""

    mode: str
    comparisons: int
    different: int
    hits: int
    """Requests that reused something."""
    cached_tokens: int
    prompt_tokens: int
    evicted: int
    problems: list[str]


def prompts(count: int, seed: int) -> list[list[int]]:
    """Every prompt is new text behind a common head, behind an earlier prompt or behind a part of one."""
    chooser = random.Random(seed)
    made = [chooser.choices(range(VOCABULARY), k=150)]
    while len(made) <= count:
        base = chooser.choice(made)
        cut = chooser.choice([len(base), len(base), chooser.randint(100, len(base))])
        new = chooser.choices(range(VOCABULARY), k=chooser.choice([1, 3, 40, 200, 400]))
        made.append((base[:cut] if cut < 1200 else made[0]) + new)
    return made[1:]


def greedy(server: Engine, ids: Sequence[int]) -> tuple[list[int], int]:
    """The answer's ids, and the prompt tokens reused.

    Raises:
        SystemExit: the engine refused.
    """
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    response = server.http.post("/generate", json={"input_ids": list(ids), "sampling_params": sampling})
    if response.status_code != httpx.codes.OK:
        raise SystemExit(f"the engine answered {response.status_code}: {response.text[:300]}")
    return response.json()["output_ids"], response.json()["meta_info"]["cached_tokens"]


def compare(mode: Mode, comparisons: int, seed: int) -> Result:
    """Cold answers first, then the comparisons."""
    pools = Pools(6144, 18, CONCURRENT, 1024, mode.page_size, overlap=mode.overlap)
    texts = prompts(max(comparisons // 3, 1), seed)
    with engine("k3", pools) as server:
        cold = list(cold_answers(server, texts, mode.name))
        server.flush()
        order = random.Random(seed).choices(range(len(texts)), k=comparisons)
        with ThreadPoolExecutor(CONCURRENT) as pool:
            answers = pool.map(lambda i: greedy(server, texts[i]), order)
            warm = list(track(answers, f"{mode.name}, warm", comparisons, console=Console(stderr=True)))
        (counted,) = server.http.get("/k3/cache/metrics").json()["ranks"]
        (checked,) = server.http.get("/k3/cache/check").json()["ranks"]
    return Result(
        mode.name,
        comparisons,
        sum(ids != cold[i] for (ids, _), i in zip(warm, order, strict=True)),
        sum(cached > 0 for _, cached in warm),
        sum(cached for _, cached in warm),
        sum(len(texts[i]) for i in order),
        sum(counted["metrics"]["evicted"].values()),
        checked["problems"],
    )


def cold_answers(server: Engine, texts: Sequence[Sequence[int]], name: str) -> Iterator[list[int]]:
    """What every prompt gives when nothing is cached."""
    for ids in track(texts, f"{name}, cold", console=Console(stderr=True)):
        server.flush()
        yield greedy(server, ids)[0]


def show(results: Sequence[Result]) -> None:
    """Print the table."""
    table = Table(title=f"greedy answers of {NEW_TOKENS} tokens, warm against cold")
    for name in ("mode", "compared", "different", "hits", "reused", "dropped", "check"):
        table.add_column(name, justify="left" if name in ("mode", "check") else "right")
    for row in results:
        reused = f"{row.cached_tokens / row.prompt_tokens:.0%}"
        numbers = (row.comparisons, row.different, row.hits, reused, row.evicted)
        table.add_row(row.mode, *map(str, numbers), "; ".join(row.problems) or "clean")
    Console().print(table)


def main() -> int:
    """Parse arguments, compare, print."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comparisons", type=int, default=300, help="of all modes together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    os.environ["K3_SGLANG_CACHE_CHECK"] = "1"  # the engine compares index, tree and pools whenever it is idle
    results = [compare(mode, arguments.comparisons // len(MODES), arguments.seed) for mode in MODES]
    show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in results], indent=1), encoding="utf-8")
    return 1 if any(row.different or row.problems for row in results) else 0


if __name__ == "__main__":
    sys.exit(main())
