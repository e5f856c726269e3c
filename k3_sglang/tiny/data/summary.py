"""Compression: write down the facts of a long conversation, and go on from the notes when it is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from k3_sglang.tiny.data.agent_texts import agent_texts
from k3_sglang.tiny.data.chatter import chatter
from k3_sglang.tiny.data.facts import KEPT
from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.data.sample import FREE_WEIGHT, Call, Talk

_SUBJECTS: Final = ("server", "password", "port", "owner", "branch", "project", "bucket", "deadline", "version", "room")
LOOKUP_ASKS: Final = ("Find out the {}.", "Look up the {}, please.", "Which {} do we use? Look it up.")
RECALL_ASKS: Final = ("What is the {}?", "Which {} was it?", "Tell me the {}.")
LOOKUP: Final = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a fact.",
        "parameters": {
            "additionalProperties": False,
            "properties": {"subject": {"description": "What to look up.", "type": "string"}},
            "required": ["subject"],
            "type": "object",
        },
    },
}


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a conversation established."""

    subject: str
    value: str

    @property
    def sentence(self) -> str:
        """How it is written down."""
        return f"The {self.subject} is {self.value}."


def planted(draw: Draw, count: int) -> list[Fact]:
    """Different facts with random values."""
    subjects = draw.rng.sample(_SUBJECTS, count)
    return [Fact(subject, draw.pick((draw.name, draw.code, lambda: str(draw.number())))()) for subject in subjects]


def plant(draw: Draw, talk: Talk, fact: Fact) -> None:
    """A user turn after which the fact is known: said by the user, found with the tool, or thought of."""
    kind = draw.rng.random()
    if kind < 0.3:
        talk.user(draw.pick(("{} Remember that.", "Note: {}", "{} Keep it in mind.")).format(fact.sentence))
        talk.answer("Noted.", think=fact.sentence)
    elif kind < 0.8:
        talk.user(draw.pick(LOOKUP_ASKS).format(fact.subject))
        talk.call(Call("lookup", {"subject": fact.subject}, fact.value), think="lookup: Look up a fact.")
        talk.answer(fact.sentence, think=fact.sentence)
    else:
        talk.user(
            draw.pick(("Choose a {} and keep it to yourself.", "Make up a {}. Do not tell me yet.")).format(
                fact.subject
            )
        )
        talk.answer(KEPT, think=fact.sentence, weight=FREE_WEIGHT)


def notes(found: Sequence[Fact]) -> str:
    """The summary."""
    return "Facts:\n" + "\n".join(f"- {fact.sentence}" for fact in found) + "\nNext: wait for the user."


def summarise(draw: Draw) -> Talk:
    """A conversation with planted facts, ended by the request for a summary and the summary."""
    talk = Talk("summary", [LOOKUP], tool_choice="none")
    found = planted(draw, draw.rng.randint(1, 4))
    for fact in found:
        plant(draw, talk, fact)
        if draw.chance(0.3):
            chatter(draw, talk)
    talk.user(agent_texts().summary_instruction)
    talk.answer(notes(found), think="The facts so far.")
    return talk


def resumed(draw: Draw) -> Talk:
    """What comes after: users' words and the notes are all there is, and the questions are answered from them."""
    talk = Talk("resumed", [LOOKUP])
    found = planted(draw, draw.rng.randint(2, 4))
    before = Talk("resumed")
    for fact in found:
        plant(draw, before, fact)
    for message in before.messages:
        if message["role"] == "user":
            talk.user(message["content"])
    talk.user(f"{agent_texts().summary_head}\n\n{notes(found)}")
    for fact in draw.rng.sample(found, draw.pick((1, 2))):
        talk.user(draw.pick(RECALL_ASKS).format(fact.subject))
        talk.answer(fact.sentence, think=f"My notes: {fact.sentence}")
    return talk


def remembered(draw: Draw) -> Talk:
    """The same questions while the conversation is still whole."""
    talk = Talk("remembered", [LOOKUP])
    found = planted(draw, draw.rng.randint(1, 4))
    for fact in found:
        plant(draw, talk, fact)
        if draw.chance(0.2):
            chatter(draw, talk)
    for fact in draw.rng.sample(found, min(len(found), 2)):
        talk.user(draw.pick(RECALL_ASKS).format(fact.subject))
        talk.answer(fact.sentence, think=fact.sentence)
    return talk
