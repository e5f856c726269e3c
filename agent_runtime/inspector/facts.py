"""What the inspector knows of a step without its content: counts, times, verdicts; and what stands out in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

MarkKind: TypeAlias = Literal["repaired", "lost", "moved", "window", "cut", "open"]


class CameBack(NamedTuple):
    """How the turn that a step goes on from came back: the message it was, the verdict, and the reason if not exact."""

    at: int
    verdict: str
    reason: str | None


class Mark(NamedTuple):
    """Something to look at, in a few words."""

    kind: MarkKind
    text: str


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """One output of a step. ``limit`` is why the cache did not give more, if it says so."""

    id: int
    choice: int
    ended_ms: int
    prompt_tokens: int
    cached_tokens: int
    think_tokens: int
    text_tokens: int
    call_tokens: int
    finish: str
    warnings: Sequence[str] = ()
    limit: str | None = None

    @property
    def output_tokens(self) -> int:
        """All generated tokens, structure included."""
        return self.think_tokens + self.text_tokens + self.call_tokens


@dataclass(slots=True)
class StepFacts:
    """One request and what came of it.

    ``name`` is the client's name for the session, "" without one; ``is_conversation`` says whether it is one
    conversation. ``parent`` is the turn it goes on from; ``replay`` the JSON of ``k3.replay``. ``began_ms`` and
    ``ended_ms`` are None until the first token came and the answer was over, and when that is not known;
    ``began_cached_tokens`` are what the engine said of the cache with the first token. ``abandoned_from``: before this
    step its client said that it has left what lay behind so many tokens.
    """

    id: int
    session: int
    name: str
    is_conversation: bool
    parent: int | None
    created_ms: int
    form: str
    encoded_tokens: int
    replay: Mapping[str, Any]
    came_back: CameBack | None
    images: int = 0
    abandoned_from: int | None = None
    running: bool = False
    began_ms: int | None = None
    began_cached_tokens: int = 0
    ended_ms: int | None = None
    turns: list[TurnFacts] = field(default_factory=list[TurnFacts])

    @property
    def prompt_tokens(self) -> int:
        """As the engine counted them; as encoded here while it has not."""
        return self.turns[0].prompt_tokens if self.turns else self.encoded_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        return self.turns[0].cached_tokens if self.turns else self.began_cached_tokens

    @property
    def is_computed(self) -> bool:
        """Whether the prompt has been computed, as far as is known."""
        return bool(self.turns) or self.began_ms is not None

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.cached_tokens if self.is_computed else 0

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens of which it is not known whether they were computed."""
        return 0 if self.is_computed else self.prompt_tokens

    @property
    def think_tokens(self) -> int:
        """Of all choices."""
        return sum(turn.think_tokens for turn in self.turns)

    @property
    def text_tokens(self) -> int:
        """Of all choices, with the structure around text."""
        return sum(turn.text_tokens for turn in self.turns)

    @property
    def call_tokens(self) -> int:
        """Of all choices."""
        return sum(turn.call_tokens for turn in self.turns)

    @property
    def output_tokens(self) -> int:
        """All that was generated."""
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def verdict(self) -> str:
        """The worst of all turns of its history."""
        return str(self.replay.get("verdict", "new"))

    @property
    def first_token_ms(self) -> int | None:
        """Time from the request on record to the first token."""
        return None if self.began_ms is None else self.began_ms - self.created_ms

    @property
    def total_ms(self) -> int | None:
        """Time from the request on record to the end of its answer."""
        return None if self.ended_ms is None else self.ended_ms - self.created_ms


_VERDICTS: Mapping[str, tuple[MarkKind, str]] = {
    "repaired": ("repaired", "put right from the record"),
    "missing": ("lost", "without the thinking"),
    "foreign": ("lost", "not as generated here"),
}


def marks(step: StepFacts, before: StepFacts | None) -> list[Mark]:
    """What stands out in a step; ``before`` is the one before it in its session."""
    found: list[Mark] = []
    if step.abandoned_from is not None:
        found.append(Mark("window", f"compressed: the client has left what lay behind token {step.abandoned_from:,}"))
    elif _begins_anew(step, before):
        found.append(Mark("window", "the history begins anew: compressed, or another task under this name"))
    for verdict, (kind, words) in _VERDICTS.items():
        number = int(step.replay.get(verdict, 0))
        # What was so at the step before is no news: a turn that was lost stays lost.
        if number > (0 if before is None else int(before.replay.get(verdict, 0))):
            found.append(Mark(kind, f"{number} {'turn' if number == 1 else 'turns'} {words}"))
    prefix: Mapping[str, Any] = step.replay.get("prefix") or {}
    if prefix.get("holds") is False:
        # Before another server messages are compared, and what is lost is counted in bytes of their JSON.
        unit = "tokens" if "lost_tokens" in prefix else "bytes"
        found.append(Mark("moved", f"{prefix.get('moved')} is not as before: {prefix.get(f'lost_{unit}', 0):,} {unit}"))
    found += [Mark("cut", f"choice {turn.choice} cut by its budget") for turn in step.turns if turn.finish == "length"]
    if not step.turns:
        found.append(Mark("open", "running" if step.running else "no answer on record: it failed, or the client left"))
    return found


def _begins_anew(step: StepFacts, before: StepFacts | None) -> bool:
    """A named conversation whose history holds none of the turns before, and less than before."""
    if before is None or step.parent is not None or not step.is_conversation or not step.name:
        return False
    return step.prompt_tokens < before.prompt_tokens
