"""Random names, numbers and paths, divided into those for training and those held out for evaluation."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, TypeVar

Split: TypeAlias = Literal["train", "held_out"]
T = TypeVar("T")

_ENGLISH: Final = frozenset(["be", "do", "go", "no", "so", "to", "me", "pa", "ma", "le", "ne", "re", "ze"])

SYLLABLES: Final = tuple(
    consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou" if consonant + vowel not in _ENGLISH
)
"""What names are made of. Each is one piece of the vocabulary and no piece holds two, so that a name is cut in the same
way wherever it stands and a held-out name consists of pieces that training has seen. English words
and the ends of frequent ones are left out."""

_WORD_LIST: Final = """
basket wallet prices stock scores points rooms meters litres tickets parcels shelf garden bottle kitchen window
ladder pencil candle carpet mirror engine tunnel bridge harbor planet comet violin drums rhythm canvas colour marble
copper silver cotton velvet ribbon button zipper pocket jacket helmet saddle rudder paddle socket hammer pliers
wrench shovel bucket barrel funnel kettle teapot saucer napkin
"""

WORDS: Final = tuple(_WORD_LIST.split())
"""English words that serve as names too; none of them is used in a sentence, so none is joined with its space."""

_WORD_TRIES: Final = 60
_CONFUSABLE: Final = 0.4
"""Share of the training conversations whose names are made of few syllables, so that names begin and go on alike and
one is copied rightly only by what stands before the syllable, not by the syllable alone."""
_FEW_SYLLABLES: Final = (9, 20)
_HELD_OUT_BYTE: Final = 51
"""Names whose hash begins with a byte below this are held out: one in five."""


def is_held_out(name: str) -> bool:
    """Whether a name, code or number belongs to the evaluation; decided by its hash alone."""
    return hashlib.sha256(name.encode()).digest()[0] < _HELD_OUT_BYTE


class Draw:
    """Random choices of one conversation. No name or number comes twice.

    Everything that is copied from one place of a conversation to another is drawn here, so that a conversation of one
    split holds no name of the other.
    """

    def __init__(self, seed: str, split: Split) -> None:
        """Args: seed: any text; the same text gives the same conversation."""
        self.rng = random.Random(seed)
        self.split: Split = split
        self._used: set[str] = set()
        self._syllables: Sequence[str] = SYLLABLES
        if split == "train" and self.chance(_CONFUSABLE):
            self._syllables = self.rng.sample(SYLLABLES, self.rng.randint(*_FEW_SYLLABLES))

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, the same ones in both splits."""
        return self.rng.choice(options)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def name(self, syllables: int | None = None) -> str:
        """A new pronounceable name of lower-case letters, 2 to 4 syllables unless told."""
        while True:
            count = syllables or self.rng.choice((2, 2, 3, 3, 3, 4))
            if found := self._fresh("".join(self.rng.choices(self._syllables, k=count))):
                return found

    def word(self) -> str:
        """A new English noun, of those that no sentence uses; a made-up name when there is hardly one left.

        Nouns are for training alone. One that training never used would consist of pieces that occur nowhere else,
        which is another task than copying an unknown name; so the evaluation gets a made-up one here too.
        """
        if self.split == "held_out":
            return self.name()
        for _ in range(_WORD_TRIES):
            found = self.rng.choice(WORDS)
            if found not in self._used:
                self._used.add(found)
                return found
        return self.name()

    def identifier(self) -> str:
        """A name as programs have them: a made-up word, an English one, or two words."""
        kind = self.rng.random()
        if kind < 0.7:
            return self.name(self.rng.choice((2, 2, 2, 3)))
        return self.word() if kind < 0.85 else f"{self.name(2)}_{self.name(2)}"

    def number(self, low: int = 10, high: int = 9999) -> int:
        """A number, as likely short as long."""
        while True:
            digits = self.rng.randint(len(str(low)), len(str(high)))
            value = self.rng.randint(max(low, 10 ** (digits - 1)), min(high, 10**digits - 1))
            if self._fresh(str(value)):
                return value

    def code(self) -> str:
        """A name and a number of two digits, such as kavoru-41."""
        while True:
            if found := self._fresh(f"{''.join(self.rng.choices(self._syllables, k=3))}-{self.rng.randint(10, 99)}"):
                return found

    def file(self) -> str:
        """A file name with an ending."""
        return f"{self.identifier()}{self.rng.choice(('.py', '.txt', '.md', '.json', '.csv'))}"

    def path(self) -> str:
        """A file name below up to two folders."""
        folders = [self.name(2) for _ in range(self.rng.choice((0, 1, 1, 2)))]
        return "/".join([*folders, self.file()])

    def _fresh(self, text: str) -> str | None:
        if text in self._used or is_held_out(text) != (self.split == "held_out"):
            return None
        self._used.add(text)
        return text
