"""What a look comes to: what was looked at, how it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "blocks"]
"""``blocks`` keeps the launch from working; ``note`` may."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    area: str
    level: Level
    text: str
    fix: str = ""
    """What to do; empty where nothing is wrong."""


def ok(area: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(area, "ok", text)


def note(area: str, text: str, fix: str) -> Finding:
    """Worth knowing."""
    return Finding(area, "note", text, fix)


def blocks(area: str, text: str, fix: str) -> Finding:
    """Has to be put right first."""
    return Finding(area, "blocks", text, fix)


def from_line(area: str, line: str) -> Finding:
    """A problem that was told in one line, its remedy behind the first semicolon."""
    text, _, fix = line.partition("; ")
    return blocks(area, text, fix or "see docs/launch.md, Errors before the start")
