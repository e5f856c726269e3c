"""Three-turn sessions with the prefix cache on and flushed: are greedy tokens identical, and how much was reused?

python -m k3_sglang.launch --model tiny-random --served-name tiny --engine-port 30001 &
python benchmarks/prefix_hits.py --engine-url http://127.0.0.1:30001
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from rich.console import Console
from rich.table import Table

LENGTHS = (63, 64, 65, 130, 300, 1000)
TURNS = 3
NEW_TOKENS = 32
FLUSH_TRIES = 100
VOCABULARY = 1792
"""Ordinary token ids of the tiny model."""


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    prompt_tokens: int
    cached_tokens: int
    output_ids: tuple[int, ...]


def generate(engine: httpx.Client, ids: Sequence[int]) -> Turn:
    """Greedy continuation of exactly ``NEW_TOKENS`` tokens."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    response = engine.post("/generate", json={"input_ids": list(ids), "sampling_params": sampling})
    body = response.raise_for_status().json()
    return Turn(len(ids), body["meta_info"]["cached_tokens"], tuple(body["output_ids"]))


def flush(engine: httpx.Client) -> None:
    """Empty the prefix cache; SGLang refuses until the last request is fully accounted for."""
    for _ in range(FLUSH_TRIES):
        if engine.post("/flush_cache").status_code == httpx.codes.OK:
            return
        time.sleep(0.05)
    raise SystemExit("the engine would not flush its cache: is another client using it?")


def session(engine: httpx.Client, length: int, *, flush_each_turn: bool) -> list[Turn]:
    """A prompt of ``length`` tokens, then answers and further text; the same session for both settings."""
    source = random.Random(length)
    flush(engine)
    ids = source.choices(range(VOCABULARY), k=length)
    turns = []
    for _ in range(TURNS):
        if flush_each_turn:
            flush(engine)
        turn = generate(engine, ids)
        turns.append(turn)
        ids = [*ids, *turn.output_ids, *source.choices(range(VOCABULARY), k=40)]
    return turns


def main() -> int:
    """Run all lengths; exit code 1 when any token differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-url", required=True, help="address of SGLang's own server")
    arguments = parser.parse_args()
    table = Table(title=f"greedy tokens of three-turn sessions, {NEW_TOKENS} per turn, cached and cold")
    for column in ("first prompt", "turn", "prompt tokens", "cached tokens", "computed", "same tokens as cold"):
        table.add_column(column, justify="right")
    different = 0
    with httpx.Client(base_url=arguments.engine_url, timeout=120, trust_env=False) as engine:
        for length in LENGTHS:
            cold = session(engine, length, flush_each_turn=True)
            warm = session(engine, length, flush_each_turn=False)
            for number, (with_cache, without) in enumerate(zip(warm, cold, strict=True), 1):
                same = with_cache.output_ids == without.output_ids
                different += not same
                computed = with_cache.prompt_tokens - with_cache.cached_tokens
                row = (length, number, with_cache.prompt_tokens, with_cache.cached_tokens, computed)
                table.add_row(*map(str, row), "yes" if same else "NO")
    Console().print(table)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
