"""A small Python project with one bug and a test that shows it, for an agent to repair."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = '''"""Statistics over a stream of measurements."""


def moving_average(values: list[float], window: int) -> list[float]:
    """Averages of every full window of `window` neighbouring values."""
    if window < 1:
        raise ValueError(f"window={window}, must be at least 1")
    averages = []
    for start in range(len(values) - window):
        averages.append(sum(values[start : start + window]) / window)
    return averages


def largest_jump(values: list[float]) -> float:
    """Largest absolute difference between neighbours; 0.0 for fewer than two values."""
    return max((abs(after - before) for before, after in zip(values, values[1:])), default=0.0)
'''

TESTS = '''"""Tests of measurements.py; run with: python -m unittest"""

import unittest

from measurements import largest_jump, moving_average


class MovingAverage(unittest.TestCase):
    def test_every_full_window_is_averaged(self):
        self.assertEqual(moving_average([1.0, 2.0, 3.0, 4.0], 2), [1.5, 2.5, 3.5])

    def test_a_window_as_long_as_the_values_gives_one_average(self):
        self.assertEqual(moving_average([2.0, 4.0], 2), [3.0])

    def test_a_window_longer_than_the_values_gives_none(self):
        self.assertEqual(moving_average([1.0], 2), [])


class LargestJump(unittest.TestCase):
    def test_direction_does_not_matter(self):
        self.assertEqual(largest_jump([1.0, 4.0, 2.0]), 3.0)


if __name__ == "__main__":
    unittest.main()
'''

TASKS = (
    "The test suite of this project fails (python -m unittest). Find the bug, fix it in measurements.py, and "
    "run the tests again.",
    "Add a function `running_total(values)` to measurements.py with a test of its own, and run the tests.",
    "Read measurements.py once more, run all tests a last time, and sum up what you changed in two sentences.",
)


def write_sample_project(directory: Path) -> None:
    """Write the project into `directory`, which must be empty."""
    (directory / "measurements.py").write_text(SOURCE, "utf-8")
    (directory / "test_measurements.py").write_text(TESTS, "utf-8")


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
