"""What cases came to: success rates with Wilson intervals, as a table and as JSON."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from rich.table import Table

_Z95: Final = 1.959964


@dataclass(slots=True)
class Case:
    """One held-out case: a verdict for each measure it was looked at for, and what the model wrote."""

    verdicts: dict[str, bool] = field(default_factory=dict[str, bool])
    turns: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])
    """Verdicts on single turns, by measure: a conversation has several of a kind."""
    outputs: list[str] = field(default_factory=list[str])
    problem: str = ""
    """What was expected at the first mistake, or the endpoint's failure."""
    greedy: bool = True
    """Whether the outputs depend on nothing but the prompt."""


class Interval(NamedTuple):
    """Bounds of a probability."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Rate:
    """How often a measure held."""

    right: int
    count: int

    @property
    def value(self) -> float:
        """Share of the cases."""
        return self.right / self.count

    @property
    def interval(self) -> Interval:
        """Wilson's 95 % interval."""
        return wilson(self.right, self.count)


def wilson(right: int, count: int) -> Interval:
    """Wilson's 95 % interval of a probability of which `right` in `count` were seen.

    Raises ValueError unless 0 <= right <= count and count > 0.
    """
    if not 0 <= right <= count or count < 1:
        raise ValueError(f"right={right} of count={count}; give 0 <= right <= count and at least one case")
    share, square = right / count, _Z95 * _Z95
    centre = share + square / (2 * count)
    spread = _Z95 * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    low, high = ((centre + sign * spread) / (1 + square / count) for sign in (-1, 1))
    return Interval(max(0.0, low) if right else 0.0, min(1.0, high) if right < count else 1.0)


def rates(cases: Sequence[Case]) -> dict[str, Rate]:
    """Success of each measure, in the order in which measures first occur."""
    found: dict[str, list[bool]] = {}
    for case in cases:
        for measure, right in (*case.turns, *case.verdicts.items()):
            found.setdefault(measure, []).append(right)
    return {measure: Rate(sum(verdicts), len(verdicts)) for measure, verdicts in found.items()}


def table(found: Mapping[str, Rate], explained: Mapping[str, str]) -> Table:
    """One row per measure."""
    shown = Table("measure", "right", "of", "rate", "95 % interval", "what counts as right")
    for measure, rate in found.items():
        low, high = rate.interval
        interval = f"{low:.1%} to {high:.1%}"
        what = explained.get(measure, "")
        shown.add_row(measure, str(rate.right), str(rate.count), f"{rate.value:.1%}", interval, what)
    return shown


def report(head: Mapping[str, Any], cases: Mapping[str, Sequence[Case]]) -> dict[str, Any]:
    """All of it as JSON. Two runs with the same greedy outputs have the same `greedy_sha256`."""
    measures = {
        measure: {"right": rate.right, "count": rate.count, "rate": rate.value, "interval": list(rate.interval)}
        for measure, rate in rates([case for group in cases.values() for case in group]).items()
    }
    greedy = {skill: [case.outputs for case in group if case.greedy] for skill, group in cases.items()}
    digest = hashlib.sha256(json.dumps(greedy, sort_keys=True).encode()).hexdigest()
    details = {
        skill: [{"verdicts": c.verdicts, "turns": c.turns, "problem": c.problem, "outputs": c.outputs} for c in group]
        for skill, group in cases.items()
    }
    return {**head, "measures": measures, "greedy_sha256": digest, "cases": details}
