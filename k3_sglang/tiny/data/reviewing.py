"""Bugs without tools: the user shows a short function and what is wrong with it, the answer is the line to change."""

from __future__ import annotations

from typing import Final

from k3_sglang.tiny.data.functions import Bug, Function, diagnosis, function
from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.data.sample import Talk

_ASKS: Final = (
    "{source}\n{call} gives {found}, not {wanted}. Find the bug.",
    "Find the bug: {call} is {found}, but must be {wanted}.\n\n{source}",
    "What is wrong here? The test says {found} != {wanted} for {call}.\n\n{source}",
)


def review(draw: Draw) -> Talk:
    """One to three functions, one after the other: the thinking of a repair at a tenth of its length."""
    talk = Talk("review")
    for _ in range(draw.rng.randint(1, 3)):
        made = function(draw, broken=True)
        assert made.bug is not None
        facts = {"source": made.source(), "call": made.call, "found": repr(made.value())}
        talk.user(draw.pick(_ASKS).format(**facts, wanted=repr(made.value(fixed=True))).rstrip())
        talk.answer(change(made, made.bug), think=diagnosis(made, made.bug))
    return talk


def change(made: Function, bug: Bug) -> str:
    """The answer."""
    return f"In {made.name} replace `{bug.wrong.strip()}` by `{bug.right.strip()}`."
