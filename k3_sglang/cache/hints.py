"""What a request may tell the cache, carried in its sampling parameters; a wrong one costs speed, never correctness."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3_sglang.cache.placement import Reason, Wanted

PARAMETER = "k3_cache"
"""Key inside ``sampling_params.custom_params``. Its value is an object, or that object as JSON text: SGLang allows
no lists in objects inside ``custom_params``."""

MAX_POSITIONS = 64
"""Positions that one request may name, and pins: each costs a look at every chunk of its prefill."""

MAX_TOKENS = 1 << 40
MAX_SECONDS = 1e6
MAX_NOW_S = 1e11
"""Beyond these a number is a mistake, and arithmetic with it would spread. A clock may show the year 5138."""

FORK_PIN_S = 60.0
"""A head that a fan-out was announced for is kept this long, whoever else is short of slots."""


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
    pins: tuple[tuple[int, float], ...] = ()
    """Positions, in tokens, with the seconds to keep each; they count as boundaries too."""
    fork: int = 0
    """So many further requests with this head will follow soon."""

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
        raw = _object(custom_params[PARAMETER])
        if not isinstance(raw, Mapping):
            raise HintError(f"{PARAMETER} is {_shown(raw)}; it must be an object of hints")
        unknown = set(raw) - set(cls.__dataclass_fields__)
        if unknown:
            allowed = ", ".join(cls.__dataclass_fields__)
            raise HintError(f"{PARAMETER} has an unknown field {_shown(min(map(str, unknown)))}; allowed: {allowed}")
        return cls(**{name: _READERS[name](f"{PARAMETER}.{name}", value) for name, value in raw.items()})

    @property
    def named(self) -> dict[int, float]:
        """Every named position, in tokens, with the seconds to pin it; 0 for none."""
        seconds = {position: self.pin_s for position in (self.head_len, *self.boundaries)}
        if self.fork:
            seconds[self.head_len] = max(self.pin_s, FORK_PIN_S)
        for position, pin_s in self.pins:
            seconds[position] = max(pin_s, seconds.get(position, 0.0))
        seconds.pop(0, None)
        return seconds

    def wanted(self, prefix_len: int, prompt_len: int) -> list[Wanted]:
        """Named positions strictly inside the part that will be computed, ascending, with the reason to cut there."""
        head = Reason.FAN_OUT if self.fork else Reason.HEAD
        inside = sorted(position for position in self.named if prefix_len < position < prompt_len)
        return [Wanted(position, head if position == self.head_len else Reason.BOUNDARY) for position in inside]


def _object(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise HintError(f"{PARAMETER} is {_shown(value)}, which is not JSON") from error


def _shown(value: Any) -> str:
    """A value for a message, bounded."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _session(name: str, value: Any) -> str | None:
    if value is None or (isinstance(value, str) and 0 < len(value) <= 256):
        return value
    raise HintError(f"{name} is {_shown(value)}; it must be text of 1 to 256 characters")


def _position(name: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS:
        return value
    raise HintError(f"{name} is {_shown(value)}; it must be a whole number, 0 to {MAX_TOKENS}")


def _positions(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_POSITIONS:
        raise HintError(f"{name} is {_shown(value)}; it must be a list of at most {MAX_POSITIONS} token positions")
    return tuple(sorted({_position(name, position) for position in value}))


def _pins(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    pairs = isinstance(value, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value)
    if not pairs or len(value) > MAX_POSITIONS:
        raise HintError(f"{name} is {_shown(value)}; it must be a list of at most {MAX_POSITIONS} [position, seconds]")
    return tuple((_position(name, position), _seconds(name, seconds)) for position, seconds in value)


def _seconds(name: str, value: Any, most: float = MAX_SECONDS) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and 0 <= value <= most and math.isfinite(value):
        return float(value)
    raise HintError(f"{name} is {_shown(value)}; it must be a number of seconds, 0 to {most:g}")


def _seconds_or_none(name: str, value: Any) -> float | None:
    return None if value is None else _seconds(name, value)


def _clock(name: str, value: Any) -> float | None:
    return None if value is None else _seconds(name, value, MAX_NOW_S)


def _switch(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise HintError(f"{name} is {_shown(value)}; it must be true or false")


_READERS = {
    "session": _session,
    "head_len": _position,
    "boundaries": _positions,
    "wait_s": _seconds_or_none,
    "release": _switch,
    "pin_s": _seconds,
    "now_s": _clock,
    "pins": _pins,
    "fork": _position,
}
