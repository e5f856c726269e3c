"""A small task that needs what the real one needs, copying and recall, to compare settings within minutes.

A conversation is a list of facts ``key : value`` of random tokens, then questions ``? key`` whose answers repeat the
value. Only answers count in the loss. Nothing but the context tells them, so the loss measures induction alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

from k3_sglang.tiny.train.data import Item

_ALPHABET: Final = 200
_FACT, _ASK, _SEPARATOR, _END = 250, 251, 252, 253


def samples(seed: int, mix: str, max_len: int, start: int) -> Iterator[Item]:
    """Endless conversations from number ``start`` on; ``mix`` is part of the seed."""
    index = start
    while True:
        yield _sample(random.Random(f"{seed}/{mix}/{index}"), max_len)
        index += 1


def _sample(rng: random.Random, max_len: int) -> Item:
    count = rng.randint(2, max(2, min(24, max_len // 20)))
    words = [tuple(rng.randrange(_ALPHABET) for _ in range(rng.randint(2, 3))) for _ in range(count)]
    facts = [(key, tuple(rng.randrange(_ALPHABET) for _ in range(rng.randint(2, 6)))) for key in dict.fromkeys(words)]
    ids: list[int] = []
    weights: list[float] = []

    def write(tokens: tuple[int, ...], weight: float) -> None:
        ids.extend(tokens)
        weights.extend([weight] * len(tokens))

    for key, value in facts:
        write((_FACT, *key, _SEPARATOR, *value), 0.0)
    for key, value in rng.sample(facts, min(len(facts), 8)):
        write((_ASK, *key, _SEPARATOR), 0.0)
        write((*value, _END), 1.0)
    return tuple(ids[:max_len]), tuple(weights[:max_len]), "recall"
