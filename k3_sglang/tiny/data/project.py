"""Small projects: a module with one to three functions, its test, and maybe notes; one or two functions have a bug."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Final

from k3_sglang.tiny.data.functions import Bug, Function, function
from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.data.workspace import Workspace

_TEMPORARY: Final = string.ascii_lowercase + string.digits + "_"


@dataclass(frozen=True, slots=True)
class Project:
    """A module and its test; further files are text."""

    module: str
    functions: tuple[Function, ...]
    notes: tuple[tuple[str, str], ...] = ()

    @property
    def source_file(self) -> str:
        """File of the module."""
        return f"{self.module}.py"

    @property
    def test_file(self) -> str:
        """File of the test."""
        return f"test_{self.module}.py"

    @property
    def broken(self) -> tuple[tuple[Function, Bug], ...]:
        """Functions with bugs, in the order in which the tests name them."""
        found = [(made, made.bug) for made in self.functions if made.bug is not None]
        return tuple(sorted(found, key=lambda entry: entry[0].name))

    def source(self) -> str:
        """The module."""
        return "\n\n".join(made.source() for made in self.functions)

    def tests(self) -> str:
        """The test module: one case for each function."""
        names = ", ".join(made.name for made in self.functions)
        cases = "\n".join(
            f"    def test_{made.name}(self):\n        self.assertEqual({made.call}, {made.value(fixed=True)!r})\n"
            for made in self.functions
        )
        return f"import unittest\n\nfrom {self.module} import {names}\n\n\nclass Tests(unittest.TestCase):\n{cases}"

    def files(self) -> dict[str, str]:
        """All files by path."""
        return {self.source_file: self.source(), self.test_file: self.tests(), **dict(self.notes)}


def project(draw: Draw, bugs: int = 1) -> Project:
    """A random project with that many bugs; each wrong line stands once in the module."""
    while True:
        made = _project(draw, bugs)
        source = made.source()
        if all(source.count(bug.wrong) == 1 for _, bug in made.broken):
            return made


def _project(draw: Draw, bugs: int) -> Project:
    count = max(bugs, draw.pick((1, 1, 1, 1, 2, 2, 3)))
    broken = [True] * bugs + [False] * (count - bugs)
    draw.rng.shuffle(broken)
    functions = tuple(function(draw, broken=flag) for flag in broken)
    notes: tuple[tuple[str, str], ...] = ()
    if draw.chance(0.15):
        notes = ((f"{draw.name()}.{draw.pick(('txt', 'md'))}", f"{draw.name()} {draw.number()}\n"),)
    return Project(draw.identifier(), functions, notes)


def workspace(draw: Draw, made: Project) -> Workspace:
    """The project in a directory with a name like those of temporary ones."""
    suffix = "".join(draw.rng.choices(_TEMPORARY, k=8))
    return Workspace(made.files(), f"/tmp/coding-agent-{suffix}")
