"""What a request may tell the cache, carried in its sampling parameters; a wrong one costs speed, never correctness."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PARAMETER = "k3_cache"
"""Key of the mapping inside ``sampling_params.custom_params``."""


class HintError(ValueError):
    """A hint that cannot be read; the message names the field, the value and what is allowed."""


@dataclass(frozen=True)
class Hints:
    """One request's hints; every default means: not known."""

    session: str | None = None
    """Requests with one name belong to one session."""
    head_len: int = 0
    """Tokens of the head that other sessions share (system prompt and tools)."""
    boundaries: tuple[int, ...] = ()
    """Further prompt positions, in tokens, where others will go on: the end of the last stable message, a fan-out."""
    wait_s: float | None = None
    """Seconds until the session is expected back after this turn; a minute or more counts against it
    (:attr:`~k3_sglang.cache.chances.EvictionSettings.waits`)."""
    release: bool = False
    """The session is certainly over after this request."""
    pin_s: float = 0.0
    """Keep the head and the boundaries for so many seconds, within the cache's budget for pins."""
    now_s: float | None = None
    """Sender's clock. Expiries are counted on it, so that all ranks of an engine agree."""

    @classmethod
    def from_custom_params(cls, custom_params: object) -> Hints:
        """Read the hints of a request.

        Args:
            custom_params: the request's ``sampling_params.custom_params``; other keys in it are not ours.

        Raises:
            HintError: a field is unknown or out of range.
        """
        if not isinstance(custom_params, Mapping) or PARAMETER not in custom_params:
            return cls()
        raw = custom_params[PARAMETER]
        if not isinstance(raw, Mapping):
            raise HintError(f"{PARAMETER} is {raw!r}; it must be an object of hints")
        unknown = set(raw) - set(cls.__dataclass_fields__)
        if unknown:
            allowed = ", ".join(cls.__dataclass_fields__)
            raise HintError(f"{PARAMETER} has an unknown field {min(map(str, unknown))!r}; allowed: {allowed}")
        return cls(**{name: _READERS[name](f"{PARAMETER}.{name}", value) for name, value in raw.items()})

    def cuts(self, prefix_len: int, prompt_len: int) -> list[int]:
        """Named positions strictly inside the part that will be computed, ascending."""
        named = {self.head_len, *self.boundaries}
        return sorted(position for position in named if prefix_len < position < prompt_len)


def _session(name: str, value: Any) -> str | None:
    if value is None or (isinstance(value, str) and 0 < len(value) <= 256):
        return value
    raise HintError(f"{name} is {value!r}; it must be text of 1 to 256 characters")


def _position(name: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise HintError(f"{name} is {value!r}; it must be a number of tokens, 0 or more")


def _positions(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise HintError(f"{name} is {value!r}; it must be a list of token positions")
    return tuple(sorted({_position(name, position) for position in value}))


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    raise HintError(f"{name} is {value!r}; it must be a number of seconds, 0 or more")


def _seconds_or_none(name: str, value: Any) -> float | None:
    return None if value is None else _seconds(name, value)


def _switch(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise HintError(f"{name} is {value!r}; it must be true or false")


_READERS = {
    "session": _session,
    "head_len": _position,
    "boundaries": _positions,
    "wait_s": _seconds_or_none,
    "release": _switch,
    "pin_s": _seconds,
    "now_s": _seconds_or_none,
}
