"""Sessions of the coding agent: it lists, reads, runs the tests, edits one line, runs them again and reports."""

from __future__ import annotations

from typing import Final

from k3_sglang.tiny.data.filework import errand
from k3_sglang.tiny.data.functions import Bug, diagnosis
from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.data.project import Project, project
from k3_sglang.tiny.data.sample import Call, Talk
from k3_sglang.tiny.data.session import Session, begin

FIX_ASKS: Final = (
    "The test suite of this project fails (python -m unittest). Find the bug, fix it in {file}, and run the tests "
    "again.",
    "The tests fail (python -m unittest). Please find and fix the bug in {file}.",
    "Fix the failing test.",
    "Run the tests (python -m unittest) and fix {file}.",
    "There is a bug in {file}. Find it and fix it; the tests must pass (python -m unittest).",
    "python -m unittest fails. Repair {file}.",
)
SUM_UP_ASKS: Final = (
    "Read {file} once more, run all tests a last time, and sum up what you changed.",
    "Run all tests again and sum up what you changed.",
    "What did you change? Run the tests once more.",
)


def coding(draw: Draw, whole: float = 0.125) -> Talk:
    """A session from list to report: one bug, or two in three of ten; in about half of them the user comes back."""
    session = begin(draw, project(draw, bugs=2 if draw.chance(0.3) else 1), whole=whole)
    fix(session)
    if draw.chance(0.2):
        errand(session)
    if draw.chance(0.4):
        sum_up(session)
    return session.talk


def agent(draw: Draw) -> Talk:
    """The same under the real agent's own system text and declarations, in full."""
    return coding(draw, whole=1.0)


def fix(session: Session) -> None:
    """The first user turn, until the tests pass."""
    draw, made = session.draw, session.project
    session.talk.user(draw.pick(FIX_ASKS).format(file=made.source_file))
    session.talk.call(Call("list_files", {}, session.space.list_files()), think="First I look at the files.")
    if draw.chance(0.06):
        wrong = f"{draw.name()}.py"
        session.read(wrong, think=f"Read {wrong}.", weight=0.0)
    session.read(made.source_file, think=f"Read {made.source_file}.")
    session.run_tests("Run the tests.")
    for function, bug in made.broken:
        if draw.chance(0.08):
            _failed_edit(session, bug)
        session.replace(bug.wrong, bug.right, think=diagnosis(function, bug))
        session.run_tests("Run the tests again.")
    session.talk.answer(report(made), think="All tests pass.")


def report(made: Project) -> str:
    """The answer at the end: what was changed in which file."""
    changes = " ".join(
        f"In {function.name} I replaced `{bug.wrong.strip()}` by `{bug.right.strip()}`."
        for function, bug in made.broken
    )
    return f"Fixed {made.source_file}. {changes} All tests pass."


def sum_up(session: Session) -> None:
    """A later user turn: the tests once more, and what was done."""
    draw, made = session.draw, session.project
    ask = draw.pick(SUM_UP_ASKS).format(file=made.source_file)
    session.talk.user(ask)
    if "once more, run" in ask:
        session.read(made.source_file, think=f"Read {made.source_file}.")
    session.run_tests("Run the tests again.")
    session.talk.answer(report(made), think="All tests pass.")


def _failed_edit(session: Session, bug: Bug) -> None:
    """An edit whose text is not in the file: not to be learnt, unlike what follows it."""
    old = bug.wrong.replace("    ", "     ", 1) + "  "
    session.replace(old, bug.right, think="Replace the line.", weight=0.0)
