"""Counts of what the guard found, for operators."""

from collections import Counter
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any

from agent_runtime.guard.verdict import Replay


class ReplayCounters:
    """Totals since the start. Thread-safe."""

    def __init__(self) -> None:
        self._requests: Counter[str] = Counter()
        self._turns: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._extended = 0
        self._moved: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._refused = 0
        self._lock = Lock()

    def count(self, replay: Replay) -> None:
        """Add one request."""
        extension = replay.extension
        with self._lock:
            self._requests[replay.verdict] += 1
            self._turns.update(replay.counts)
            self._reasons.update(str(check.reason) for check in replay.odd())
            self._extended += extension.holds is True
            if extension.moved is not None:
                self._moved[extension.moved] += 1
                self._lost[extension.moved] += extension.lost_tokens

    def refuse(self) -> None:
        """Add one request that strict mode refused."""
        with self._lock:
            self._refused += 1

    def snapshot(self) -> dict[str, Any]:
        """All counts, as JSON."""
        with self._lock:
            return {
                "requests": dict(self._requests),
                "refused_requests": self._refused,
                "turns": dict(self._turns),
                "turns_by_reason": dict(self._reasons),
                "prompts_extended": self._extended,
                "prompts_moved": dict(self._moved),
                "lost_tokens": dict(self._lost),
                "violations": self._moved["violation"],
            }


def total(snapshots: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum of the counts of several guards, one at least."""
    first, *others = ({key: _addable(value) for key, value in counts.items()} for counts in snapshots)
    for other in others:
        for key, value in other.items():
            first[key] += value
    return first


def _addable(value: int | dict[str, int]) -> Any:
    return Counter(value) if isinstance(value, dict) else value
