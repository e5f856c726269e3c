"""Combinations of flags that are known to fail, or to do something else than they say, as rules over a launch's facts.

SGLang refuses some of them itself, after minutes of imports or an hour of reading; others it rewrites with a log line.
The rules are in ``conflict_rules``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from k3_sglang.launch.planner.hardware import GPUS


@dataclass(frozen=True)
class Facts:
    """A launch as rules see it."""

    flags: Mapping[str, str | None]
    """SGLang's arguments by their long names without dashes; None is a bare flag."""
    device: str
    own_model: bool
    """Whether this package's model class runs."""
    cache: str
    gpu: str | None = None
    """Kind of GPU, where it is known."""
    environment: Mapping[str, str] | None = None
    asked_running: int | None = None
    """``max_running_requests`` as the user gave it."""
    asked_slots: int | None = None
    checkpoint_format: str = "state"
    asked_overlap: bool = False

    def size(self, name: str, default: int = 1) -> int:
        """A flag that is a whole number."""
        value = self.flags.get(name)
        return default if value is None or not value.isdecimal() else int(value)

    @property
    def family(self) -> str:
        """``sm90``, ``sm100``, ... of the GPU; empty when it is not known."""
        return GPUS[self.gpu].family if self.gpu is not None else ""

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes."""
        return self.device == "cuda"


@dataclass(frozen=True)
class Rule:
    """One known-bad combination."""

    name: str
    given: Callable[[Facts], str | None]
    """What of it is set, in the user's words; None when it is not."""
    why: str
    remedy: str
    source: str


def broken(facts: Facts, rules: Iterable[Rule]) -> list[str]:
    """One line for each rule that is broken: what is set, why it is refused, what to do, which rule and who says so."""
    found: list[str] = []
    for rule in rules:
        given = rule.given(facts)
        if given is not None:
            found.append(f"{given}: {rule.why}; {rule.remedy} ({rule.name}; {rule.source})")
    return found
