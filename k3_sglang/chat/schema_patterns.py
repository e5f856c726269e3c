"""Patterns of JSON schemas on text: decided only where that cannot take long."""

import re
from functools import lru_cache
from typing import NamedTuple

_MAX_STEPS = 5_000_000
_MAX_PATTERN_CHARS = 1000
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_SET = re.compile(r"\[\^?\]?[^\]]*\]")
# What Python reads differently from the dialect of JSON schemas, or warns of.
_FOREIGN = re.compile(r"\\[1-9pPkuxcAZz]|\(\?[^:=!]|\[\[|--|&&|~~|\|\|")


def pattern_matches(pattern: str, text: str) -> bool | None:
    """Whether `pattern` is found in `text`; None if that is not decided.

    Both come from strangers, and backtracking can take longer than anybody waits: repetitions inside repetitions
    are not tried, others only where their number and the text's length bound the steps.
    """
    known = _compiled(pattern)
    if known is None or search_steps(pattern, text) is None:
        return None
    return known.pattern.search(text) is not None


def search_steps(pattern: str, text: str) -> int | None:
    """Most steps that looking for `pattern` in `text` can take; None if that is too many or not known."""
    known = _compiled(pattern)
    if known is None:
        return None
    steps = known.choices * (len(text) + 1) ** known.repeats
    return steps if steps <= _MAX_STEPS else None


class _Pattern(NamedTuple):
    pattern: "re.Pattern[str]"
    repeats: int
    choices: int


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> _Pattern | None:
    if len(pattern) > _MAX_PATTERN_CHARS or _FOREIGN.search(pattern):
        return None
    plain = _SET.sub("c", _ESCAPE.sub("c", pattern))
    if re.search(r"\)[*+{]", plain):
        return None
    optional = plain.count("?") - plain.count("(?")
    branches = plain.count("|")
    choices = 2 ** min(optional, 64) * (branches + 1 if plain.count("(") <= 1 else 2 ** min(branches, 64))
    repeats = len(re.findall(r"[*+]|\{\d*,", plain)) + (not pattern.startswith("^"))
    # "$" is the very end there; Python also takes it before a last line break.
    written = re.sub(r"(?<!\\)\$$", r"\\Z", pattern)
    try:
        return _Pattern(re.compile(written, re.ASCII), repeats, choices)
    except (re.error, OverflowError, RecursionError):
        return None
