"""A small Python project with one bug and a test that shows it, for an agent to repair."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = '''def points(basket):
    """Sum of basket."""
    total = 0
    for marble in basket:
        total -= marble
    return total


def best(basket):
    """The largest of basket."""
    return max(basket)
'''

TESTS = """import unittest

from scores import points, best


class Tests(unittest.TestCase):
    def test_points(self):
        self.assertEqual(points([4, 9]), 13)

    def test_best(self):
        self.assertEqual(best([4, 9]), 9)
"""

TASKS = (
    "The test suite of this project fails (python -m unittest). Find the bug, fix it in scores.py, and run the tests "
    "again.",
    "Where is points used?",
    "Read scores.py once more, run all tests a last time, and sum up what you changed.",
)


def write_sample_project(directory: Path) -> None:
    """Write the project into `directory`, which must be empty."""
    (directory / "scores.py").write_text(SOURCE, "utf-8")
    (directory / "test_scores.py").write_text(TESTS, "utf-8")


def tests_pass(directory: Path, timeout_s: float = 60.0) -> bool:
    """Run the project's tests in a process of their own; one that hangs has failed."""
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-m", "unittest", "-q"],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
