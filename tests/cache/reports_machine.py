"""A program, run by the tests in a process of its own: what field reports tell, played on SGLang's real tree.

Each scenario is a function of a :class:`~tests.cache.tree_machine.Machine`, which compares every hit with a computation
without a cache, and every slot with its owner after each step. Prints one JSON object: what each scenario saw.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from k3_sglang.cache.types import Skip
from tests.cache.script import run_and_leave
from tests.cache.tree_machine import Case, Machine


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(50), k=count)


def machine(slots: int, chunk: int, page: int = 1, ahead: bool = False) -> Machine:
    made = Machine(Case(1, page, chunk, False, slots, 2048, 0, ahead))
    made.chooser = random.Random(3)
    made.chooser.random = lambda: 1.0  # nobody aborts by chance
    return made


def answer(machine: Machine, req: Any, count: int) -> None:
    """Some tokens of an answer, then its end."""
    for _ in range(count):
        at = req.kv.kv_committed_len
        assert machine.is_ahead(req) or machine.compute(req, at, at + 1)
        req.output_ids.append(machine.chooser.randrange(50))
        machine.run_ahead(req)
    machine.end(req, checkpoint=True)
    machine.check()


def text(req: Any) -> list[int]:
    return list(req.origin_input_ids) + list(req.output_ids)


def b36() -> dict[str, Any]:
    """Three slots: one request holds two of them, so the second one's prompt leaves no checkpoint."""
    seen: dict[str, Any] = {}
    m = machine(slots=3, chunk=64)
    first = m.begin(tokens(50, 1))
    second = m.begin(tokens(40, 2))
    seen["skipped"] = m.states.metrics.skipped[Skip.NO_SLOT]
    answer(m, second, 5)  # its own slot becomes a checkpoint, which needs no other
    third = m.begin([*text(second), 7])
    seen["no_slot_for_hit"] = m.states.metrics.skipped[Skip.NO_SLOT_FOR_HIT]
    answer(m, third, 3)
    answer(m, first, 3)
    later = m.begin([*text(first), 1])
    seen["later_hit"] = m.states.notes(later).found.cached_tokens
    answer(m, later, 1)
    m.flush()  # free slots and tokens are those of an empty pool again
    return seen


def b38() -> dict[str, Any]:
    """Three prompts that share 512 and 499 tokens with the first; chunks of 64 and chunks longer than a prompt."""
    seen: dict[str, Any] = {}
    for chunk in (64, 1024):
        m = machine(slots=40, chunk=chunk)
        stem = tokens(600, 5)
        cached = []
        for shared, tail in ((600, 0), (512, 60), (499, 70), (499, 80)):
            req = m.begin([*stem[:shared], *tokens(tail, 60 + tail)])
            cached.append(m.states.notes(req).found.cached_tokens)
            answer(m, req, 2)
        seen[str(chunk)] = cached
        m.flush()
    m = machine(slots=40, chunk=1024)
    system = tokens(56, 7)
    cached = []
    for sight in range(3):
        req = m.begin([*system, *tokens(138, 70 + sight)])
        cached.append(m.states.notes(req).found.cached_tokens)
        answer(m, req, 2)
    seen["system prompt"] = cached
    m.flush()
    return seen


def b39() -> dict[str, Any]:
    """The state goes and its KV stays; then the KV goes, and takes its state along."""
    seen: dict[str, Any] = {}
    m = machine(slots=10, chunk=1024)
    first = m.begin(tokens(30, 9))
    answer(m, first, 100)
    m.cache.evict(EvictParams(num_tokens=0, mamba_num=1))  # the end of the prompt: the end of the turn is worth more
    m.check()
    second = m.begin([*tokens(30, 9), 3, 4])
    found = m.states.notes(second).found
    seen["state gone"] = (found.cached_tokens, found.with_kv_tokens, found.limit.value)
    answer(m, second, 1)
    third = m.begin([*text(first), 5])
    seen["turn end"] = m.states.notes(third).found.cached_tokens
    answer(m, third, 1)
    m.cache.evict(EvictParams(num_tokens=2048, mamba_num=0))
    m.check()  # also: no state without KV
    seen["kv gone"] = len(m.states._index())
    fourth = m.begin([*text(first), 5])
    found = m.states.notes(fourth).found
    seen["after"] = (found.cached_tokens, found.limit.value)
    answer(m, fourth, 1)
    m.flush()
    return seen


SCENARIOS: list[Callable[[], dict[str, Any]]] = [b36, b38, b39]


def main() -> int:
    """Play all of them."""
    print(json.dumps({scenario.__name__: scenario() for scenario in SCENARIOS}))
    return 0


if __name__ == "__main__":
    run_and_leave(main)
