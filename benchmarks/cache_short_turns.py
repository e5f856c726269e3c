"""Sessions of short turns: prompt tokens computed again by both caches, against what was new.

    python benchmarks/cache_short_turns.py                 # four engine starts, about three minutes
    python benchmarks/cache_short_turns.py --json out.json

A turn's prompt is the last prompt, its answer and new text. New for the engine are the text and the one token that was
sampled last and never computed: `new`. Everything else could have been reused.

- `four turns`: prompts of 300, 540, 680 and 1,010 tokens, with prefill steps of 64 tokens.
- `forty turns`: 40 new tokens and an answer of 50 each time, after a prompt of 1,000.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cache_common import VOCABULARY, Engine, Pools, engine
from rich.console import Console
from rich.table import Table

CACHES = ("sglang", "k3")


@dataclass(frozen=True)
class Case:
    """One session: its first prompt, then answers and new texts in turn."""

    name: str
    chunk_tokens: int
    first_len: int
    turns: tuple[tuple[int, int], ...]
    """``(answer, new text)`` in tokens, after each prompt but the last."""


CASES = (
    Case("four turns", 64, 300, ((40, 200), (40, 100), (300, 30))),
    Case("forty turns", 2048, 1000, ((50, 40),) * 40),
)


@dataclass(frozen=True)
class Turn:
    """One request after the first."""

    case: str
    cache: str
    prompt_tokens: int
    new_tokens: int
    computed_tokens: int


def play(server: Engine, case: Case, cache: str) -> list[Turn]:
    """The session once, on an empty cache."""
    source = random.Random(case.name)
    ids = source.choices(range(VOCABULARY), k=case.first_len)
    server.flush()
    turns = []
    new_len: int | None = None
    for answer_len, text_len in (*case.turns, (1, 0)):
        reply = [source.randrange(VOCABULARY)] * answer_len
        answer = server.answer(ids, reply)
        if new_len is not None:
            turns.append(Turn(case.name, cache, len(ids), new_len, answer.computed_tokens))
        ids = ids + reply + source.choices(range(VOCABULARY), k=text_len)
        new_len = text_len + 1
    return turns


def show(turns: Sequence[Turn]) -> None:
    """Print the sums, and every turn of the short session."""
    table = Table(title="prompt tokens computed after the first turn")
    for name in ("session", "cache", "new", "computed", "again", "each turn"):
        table.add_column(name, justify="left" if name in ("session", "cache") else "right")
    for case in CASES:
        for cache in CACHES:
            rows = [turn for turn in turns if (turn.case, turn.cache) == (case.name, cache)]
            new, computed = (sum(getattr(turn, f"{name}_tokens") for turn in rows) for name in ("new", "computed"))
            each = (
                sorted({turn.computed_tokens for turn in rows}) if len(rows) > 3 else [t.computed_tokens for t in rows]
            )
            text = f"{each[0]} to {each[-1]}" if len(rows) > 3 else " / ".join(map(str, each))
            table.add_row(case.name, cache, f"{new:,}", f"{computed:,}", f"{computed - new:,}", text)
    Console().print(table)


def main() -> int:
    """Run both sessions on both caches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=64, help="state slots (default: 64, more than a session needs)")
    parser.add_argument("--json", type=Path, help="also write every turn to this file")
    arguments = parser.parse_args()
    turns: list[Turn] = []
    for case in CASES:
        for cache in CACHES:
            with engine(cache, Pools(32768, arguments.slots, 4, case.chunk_tokens)) as server:
                turns += play(server, case, cache)
    show(turns)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(turn) for turn in turns], indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
