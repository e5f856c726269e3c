"""What the guard found, turn by turn and in one word."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

Verdict: TypeAlias = Literal["exact", "repaired", "missing", "foreign", "new"]
Reason: TypeAlias = Literal[
    "absent", "filler", "copied", "duplicated", "padded", "truncated", "foreign",
    "split", "text", "dropped", "edited", "ambiguous", "unknown", "thinking_off", "interrupted",
]  # fmt: skip
Moved: TypeAlias = Literal[
    "tools_order", "tools", "effort", "system_timestamp", "system_task_list", "system_text",
    "message", "turn", "left_out", "one_shot", "unknown", "violation",
]  # fmt: skip
"""The first thing of a prompt that is not as it was; ``violation`` is a fault of ours."""
MAX_SHOWN = 16

EXPLAINED: Mapping[Reason, str] = {
    "absent": "its thinking is not there",
    "filler": "a filler stands in the place of its thinking",
    "copied": "its text stands in the place of its thinking",
    "duplicated": "it has the thinking of another turn",
    "padded": "its thinking has more around it",
    "truncated": "its thinking is cut",
    "foreign": "it has thinking that it was not generated with",
    "split": "it was sent as several messages",
    "text": "its text before the calls is not there",
    "dropped": "a turn that was generated here was left out",
    "edited": "its text or its calls were changed",
    "ambiguous": "several turns with different thinking stood here, and nothing tells which this is",
    "unknown": "it was not generated here, or so long ago that the record has dropped it",
    "interrupted": "the client has marked it as a turn that broke off, of which there is no whole record",
    "thinking_off": "it was generated with thinking, and this request turns thinking off",
}


class Check(NamedTuple):
    """One assistant turn: its place in the messages received, and what was found about it."""

    at: int
    verdict: Literal["exact", "repaired", "missing", "foreign"]
    reason: Reason | None = None

    @property
    def text(self) -> str:
        """The finding as a sentence about the message."""
        return f"messages[{self.at}]: {EXPLAINED[self.reason] if self.reason else 'as it was generated'}"


@dataclass(frozen=True, slots=True)
class Extension:
    """Whether a prompt begins with the one before it and what was generated from that.

    ``holds`` is None when there is none before it that is known. ``moved`` is the first thing that is not as it was,
    ``index`` the message it is, ``detail`` a few words, never content. ``common_tokens`` are as before,
    ``lost_tokens`` of the prompt before and its output are not.
    """

    holds: bool | None
    moved: Moved | None = None
    index: int | None = None
    detail: str = ""
    common_tokens: int = 0
    lost_tokens: int = 0

    def facts(self) -> dict[str, Any]:
        """For an answer's ``k3.replay.prefix``."""
        return {"holds": self.holds} if self.moved is None else asdict(self)


@dataclass(frozen=True, slots=True)
class Replay:
    """The findings about a whole history."""

    checks: tuple[Check, ...]
    extension: Extension = Extension(None)

    @property
    def verdict(self) -> Verdict:
        """The worst of all turns; ``new`` when there is none yet."""
        found = {check.verdict for check in self.checks}
        for verdict in ("missing", "foreign", "repaired"):
            if verdict in found:
                return verdict
        return "exact" if found else "new"

    @property
    def counts(self) -> dict[str, int]:
        """Turns by verdict."""
        found = Counter(check.verdict for check in self.checks)
        return {verdict: found[verdict] for verdict in ("exact", "repaired", "missing", "foreign")}

    def header(self) -> str:
        """Value of ``x-k3-replay``."""
        counts = "; ".join(f"{verdict}={count}" for verdict, count in self.counts.items())
        return f"{self.verdict}; {counts}"

    def facts(self) -> dict[str, Any]:
        """Value of an answer's ``k3.replay``: counts, and the turns that were not exact."""
        facts: dict[str, Any] = {"verdict": self.verdict, **self.counts}
        odd = list(self.odd())
        if odd:
            facts["turns"] = [
                {"index": check.at, "verdict": check.verdict, "reason": check.reason} for check in odd[:MAX_SHOWN]
            ]
        if self.extension.holds is not None:
            facts["prefix"] = self.extension.facts()
        return facts

    def odd(self) -> Iterator[Check]:
        """The turns that were not sent back as they were generated."""
        return (check for check in self.checks if check.verdict != "exact")


class HistoryNotIntact(Exception):
    """Strict mode met turns that are not as they were generated."""

    def __init__(self, checks: Sequence[Check]) -> None:
        shown = "; ".join(check.text for check in checks[:MAX_SHOWN])
        more = f"; and {len(checks) - MAX_SHOWN} more" if len(checks) > MAX_SHOWN else ""
        super().__init__(
            f"The history is not as it was generated: {shown}{more}. Send every assistant message back whole, "
            "reasoning_content included, or run the gateway with guard=repair."
        )
        self.checks = tuple(checks)
