"""Requests that arrive together with a long common beginning: one computes it, the others wait for its checkpoint.

Standard library only. A request is whatever the caller tells apart by a number; the caller also says how far it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Waiter:
    """One request that is not through its prompt yet."""

    number: int
    tokens: array[int]
    computed: int = 0
    """Prompt tokens whose checkpoint is in the tree."""
    leader: Waiter | None = None
    """Who computes the common beginning."""
    shared: int = 0
    """Tokens in common with the leader."""
    cuts: set[int] = field(default_factory=set[int])
    """Positions at which others wait for a checkpoint of this one."""
    rounds: int = 0
    """Scheduling rounds spent waiting."""
    holder: Any = None
    """The caller's request."""
    gone: bool = False
    """Through its prompt, finished or aborted."""


class FanOut:
    """Finds common beginnings among requests that wait or are being prefilled."""

    def __init__(self, least_tokens: int, most_rounds: int, grid: int = 1) -> None:
        """
        Args:
            least_tokens: shorter common beginnings are computed by everybody.
            most_rounds: a request waits no longer than this, whatever became of its leader.
            grid: checkpoints lie up to this many tokens (less one) before the position wanted.
        """
        self.least_tokens = least_tokens
        self.most_rounds = most_rounds
        self.grid = grid
        self._waiters: dict[int, Waiter] = {}
        self._by_beginning: dict[bytes, list[Waiter]] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._waiters.values())

    def enter(self, number: int, tokens: array[int]) -> Waiter:
        """A request, when it is first seen; later calls return the same record."""
        known = self._waiters.get(number)
        if known is not None:
            return known
        waiter = self._waiters[number] = Waiter(number, tokens)
        if len(tokens) < self.least_tokens:
            return waiter
        alike = self._by_beginning.setdefault(tokens[: self.least_tokens].tobytes(), [])
        for other in alike:
            shared = min(common_len(tokens, other.tokens), len(tokens) - 1)
            if shared > max(waiter.shared, other.computed):
                waiter.leader, waiter.shared = other, shared
        if waiter.leader is not None:
            waiter.leader.cuts.add(waiter.shared)
        alike.append(waiter)
        return waiter

    def leave(self, number: int) -> None:
        """A request is through its prompt, or is no more."""
        waiter = self._waiters.pop(number, None)
        if waiter is None:
            return
        waiter.gone = True
        if len(waiter.tokens) >= self.least_tokens:
            key = waiter.tokens[: self.least_tokens].tobytes()
            alike = self._by_beginning[key]
            alike.remove(waiter)
            if not alike:
                del self._by_beginning[key]

    def present(self, numbers: set[int]) -> None:
        """Only these are still waiting or being prefilled."""
        for number in self._waiters.keys() - numbers:
            self.leave(number)

    def must_wait(self, waiter: Waiter, cached: int) -> bool:
        """Whether a request that would reuse ``cached`` tokens now should rather wait for its leader's checkpoint."""
        leader = waiter.leader
        return (
            leader is not None
            and not leader.gone
            and max(leader.computed, cached) + self.grid <= waiter.shared
            and waiter.rounds < self.most_rounds
        )


def common_len(first: array[int], second: array[int]) -> int:
    """Length of the common beginning of two token arrays: bisection over memory comparisons."""
    one, other = memoryview(first).cast("B"), memoryview(second).cast("B")
    size = first.itemsize
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * size : middle * size] == other[low * size : middle * size]:
            low = middle
        else:
            high = middle - 1
    return low
