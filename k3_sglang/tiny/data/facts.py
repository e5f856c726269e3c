"""Facts that stand in the thinking of an earlier turn and nowhere else, asked for later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from k3_sglang.tiny.data.chatter import chatter
from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.data.sample import FREE_WEIGHT, Talk

UNKNOWN: Final = "I do not know: my thoughts of that turn are not here."
"""What the model says when the thinking that held the fact is gone."""


@dataclass(frozen=True, slots=True)
class Secret:
    """Something the model is to choose and to keep in mind."""

    noun: str
    options: tuple[str, ...]
    """What it may choose from; empty: it makes something up."""
    value: str
    """What is chosen."""

    @property
    def chance(self) -> float:
        """Probability that a guess is right; 0 stands for less than one in ten thousand."""
        return 1 / len(self.options) if self.options else (1 / 90 if self.noun == "number" else 0.0)

    def ask(self, draw: Draw) -> str:
        """The user's first message."""
        if self.options:
            start = draw.pick(("Choose one of these", "Pick one of these", "Take one of these")) + ": "
            start += ", ".join(self.options) + "."
        elif self.noun == "number":
            start = draw.pick(("Think of a number from 10 to 99.", "Choose a number from 10 to 99."))
        else:
            start = draw.pick(("Make up a code word.", "Think of a code word.", "Invent a code word."))
        return f"{start} {draw.pick(('Do not tell me yet.', 'Keep it to yourself.', 'Do not say it.'))}"

    @property
    def thought(self) -> str:
        """The thinking that holds it."""
        return f"The {self.noun} is {self.value}."


KEPT: Final = "I have chosen. I keep it to myself."


def secret(draw: Draw) -> Secret:
    """A random one; the value is drawn like every other, so that a model that has learnt it well is unpredictable."""
    kind = draw.rng.random()
    if kind < 0.4:
        options = tuple(draw.name() if draw.chance(0.8) else draw.word() for _ in range(draw.rng.randint(4, 8)))
        return Secret("choice", options, draw.pick(options))
    if kind < 0.6:
        return Secret("number", (), str(draw.rng.randint(10, 99)))
    return Secret("code word", (), draw.name(3))


def question(draw: Draw, noun: str) -> str:
    """The user's later question."""
    asks = ("What is the {}?", "Now tell me the {}.", "Which {} was it?", "Say the {}.")
    return draw.pick(asks).format(noun)


def facts(draw: Draw) -> Talk:
    """One or two secrets, other turns between, then the questions; in one of eight the thinking is gone."""
    talk = Talk("facts")
    found: Sequence[Secret] = _different(draw)
    gone = draw.chance(0.12)
    for made in found:
        talk.user(made.ask(draw))
        talk.answer(KEPT, think="" if gone else made.thought, weight=FREE_WEIGHT)
        for _ in range(draw.pick((0, 0, 1, 2))):
            chatter(draw, talk)
    if gone:
        pairs = zip(talk.messages, talk.weights, strict=True)
        talk.weights = [0.0 if message["content"] == KEPT else weight for message, weight in pairs]
    for made in draw.rng.sample(found, len(found)):
        talk.user(question(draw, made.noun))
        if gone:
            talk.answer(UNKNOWN, think=f"I see no {made.noun}.")
        else:
            talk.answer(f"The {made.noun} is {made.value}.", think=made.thought)
        if draw.chance(0.3):
            chatter(draw, talk)
    return talk


def _different(draw: Draw) -> list[Secret]:
    found = [secret(draw)]
    if draw.chance(0.4):
        other = secret(draw)
        if other.noun != found[0].noun:
            found.append(other)
    return found
