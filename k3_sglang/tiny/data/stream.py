"""The endless stream of training conversations: any one of them by its number, and named mixes of skills."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Final

from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.tiny.data.chatter import copying, small_talk
from k3_sglang.tiny.data.coding import agent, coding
from k3_sglang.tiny.data.facts import facts
from k3_sglang.tiny.data.filework import file_work
from k3_sglang.tiny.data.names import Draw, Split
from k3_sglang.tiny.data.reviewing import review
from k3_sglang.tiny.data.sample import Sample, Talk
from k3_sglang.tiny.data.summary import remembered, resumed, summarise
from k3_sglang.tiny.data.tooluse import tool_use
from k3_sglang.tiny.data.vocabulary import tokenizer as shipped_tokenizer

SKILLS: Final[Mapping[str, Callable[[Draw], Talk]]] = {
    "copy": copying,
    "chat": small_talk,
    "tools": tool_use,
    "facts": facts,
    "remembered": remembered,
    "summary": summarise,
    "resumed": resumed,
    "files": file_work,
    "review": review,
    "coding": coding,
    "agent": agent,
}

MIXES: Final[Mapping[str, Mapping[str, float]]] = {
    "copy": {"copy": 0.8, "chat": 0.2},
    "tools": {"copy": 0.15, "chat": 0.1, "tools": 0.35, "facts": 0.15, "remembered": 0.1, "review": 0.15},
    "all": {
        "copy": 0.04,
        "chat": 0.08,
        "tools": 0.2,
        "facts": 0.15,
        "remembered": 0.05,
        "summary": 0.08,
        "resumed": 0.07,
        "files": 0.06,
        "review": 0.07,
        "coding": 0.2,
    },
    "agent": {
        "copy": 0.12,
        "chat": 0.05,
        "tools": 0.33,
        "facts": 0.07,
        "remembered": 0.04,
        "summary": 0.1,
        "resumed": 0.04,
        "files": 0.04,
        "review": 0.08,
        "coding": 0.08,
        "agent": 0.05,
    },
    "coding": {"review": 0.2, "files": 0.15, "coding": 0.65},
}
"""Shares of the skills by number of conversations, as a curriculum: copying first, short calls next, then all, with the
weight on calls and bugs last."""

_CACHE_TOKENS: Final = 200_000
_TRIES: Final = 20


def talk(seed: int, split: Split, mix: str, index: int, attempt: int = 0) -> Talk:
    """One conversation: a function of its arguments alone. Raises KeyError for an unknown mix."""
    shares = MIXES[mix]
    draw = Draw(f"{seed}/{split}/{mix}/{index}/{attempt}", split)
    (skill,) = draw.rng.choices(list(shares), list(shares.values()))
    made = SKILLS[skill](draw)
    if draw.chance(0.08):
        made.effort = draw.pick(("low", "high"))
    return made


def samples(
    seed: int,
    split: Split = "train",
    mix: str = "all",
    max_len: int = 2048,
    *,
    start: int = 0,
    step: int = 1,
    tokenizer: K3Tokenizer | None = None,
) -> Iterator[Sample]:
    """Conversations number `start`, `start + step`, and so on without end.

    Args:
        seed: another seed gives other conversations.
        split: `train` for training; `held_out` has other names and values.
        mix: a key of :data:`MIXES`.
        max_len: most tokens of a conversation; a longer one is replaced by another one of the same number.
        start: number of the first; a run that goes on passes how many it has used.
        step: number of workers that share the stream, each with a `start` of its own.
        tokenizer: another vocabulary than the shipped one.

    Raises:
        KeyError: there is no such mix.
        ValueError: no conversation of the mix is so short.
    """
    known = tokenizer or shipped_tokenizer()
    cache = EncodeCache(_CACHE_TOKENS)
    for index in count(start, step):
        for attempt in range(_TRIES):
            made = talk(seed, split, mix, index, attempt).sample(known, cache)
            if len(made.ids) <= max_len:
                yield made
                break
        else:
            raise ValueError(f"max_len={max_len} is too short for mix {mix!r}: {_TRIES} conversations were longer")
