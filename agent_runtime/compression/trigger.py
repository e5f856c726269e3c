"""When a history is compressed: at the first step boundary whose next prompt reaches the trigger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FULL_TRIGGER_TOKENS: Final = 300_000
"""K3's published setting for long agent tasks."""
_SCALE: Final = (3, 4)
"""Part of a smaller window that may fill up; the rest is for the summary and the answers."""


@dataclass(frozen=True, slots=True)
class CompressionSettings:
    """When to compress, what to keep and how many calls it may cost. All sizes are tokens."""

    trigger_tokens: int | None = None
    """Tokens of the next prompt from which on the history is compressed; None scales with the window."""
    window_tokens: int | None = None
    """The model's context length; None when it is not known."""
    summary_tokens: int = 32_768
    """Output limit of the summary call, its thinking included."""
    user_tokens: int = 20_000
    """User messages kept word for word: the oldest up to `user_head_tokens`, the newest up to the rest."""
    user_head_tokens: int = 2_000
    keep_turns: int = 0
    """Latest complete turns kept with thinking, calls and results. 0 is what K3's own client keeps."""
    max_calls: int = 5
    """Model calls of one compression, failed ones included."""
    max_failures: int = 3
    """Compressions in a row that may fail before no further one is tried, unless the window is full."""
    max_overflows: int = 3
    """Times a run goes on by compressing after the endpoint said that the window is full."""
    backoff_s: float = 0.5
    """Pause before a further summary call after a failure of the endpoint; doubled each time."""

    def __post_init__(self) -> None:
        for name, least in (("summary_tokens", 1), ("user_tokens", 0), ("user_head_tokens", 0), ("keep_turns", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}, must be at least {least}")
        for name in ("max_calls", "max_failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, must be at least 1")
        if self.user_head_tokens > self.user_tokens:
            raise ValueError(f"user_head_tokens={self.user_head_tokens} is more than user_tokens={self.user_tokens}")
        if self.trigger_tokens is not None and self.trigger_tokens < 1:
            raise ValueError(f"trigger_tokens={self.trigger_tokens}, must be at least 1")
        if self.window_tokens is not None and self.trigger >= self.window_tokens:
            raise ValueError(
                f"trigger_tokens={self.trigger} does not leave room in a window of {self.window_tokens} tokens; "
                "give a smaller trigger, or none for one that fits"
            )

    @property
    def trigger(self) -> int:
        """The trigger in tokens."""
        if self.trigger_tokens is not None:
            return self.trigger_tokens
        if self.window_tokens is None:
            return FULL_TRIGGER_TOKENS
        part, whole = _SCALE
        return max(1, min(FULL_TRIGGER_TOKENS, self.window_tokens * part // whole))


class Pace:
    """Whether it is time, so that compressions neither loop nor pile up.

    After a success that did not get below the trigger, and after a failure, the history must first grow by a 20th of
    the trigger. After `max_failures` failures in a row only a full window compresses again.
    """

    def __init__(self, settings: CompressionSettings) -> None:
        self._settings = settings
        self._floor = settings.trigger
        self._failures = 0
        self._unknown_after = False

    def due(self, context_tokens: int | None) -> bool:
        """Whether the next prompt, of so many tokens, is to be compressed first; an unknown size is not."""
        if context_tokens is None or self._failures >= self._settings.max_failures:
            return False
        if self._unknown_after:
            self._unknown_after = False
            self._floor = self._above(context_tokens)
        return context_tokens >= self._floor

    def succeeded(self, after_tokens: int | None) -> None:
        """A compression was done; None when the size after it will be known only at the next `due`."""
        self._failures = 0
        self._unknown_after = after_tokens is None
        self._floor = self._settings.trigger if after_tokens is None else self._above(after_tokens)

    def failed(self, context_tokens: int | None, *, counts: bool = True) -> None:
        """A compression was not possible; `counts` is false when there was nothing to compress."""
        self._failures += counts
        self._floor = self._above(max(context_tokens or 0, self._settings.trigger))

    def _above(self, tokens: int) -> int:
        """The trigger, or one growth above a size that has reached it already."""
        trigger = self._settings.trigger
        return trigger if tokens < trigger else tokens + max(1, trigger // 20)


def clamp_output(wanted: int | None, context_tokens: int | None, window_tokens: int | None) -> int | None:
    """Output tokens that can be asked for: what is wanted, at most what the window leaves; None for no limit."""
    if context_tokens is None or window_tokens is None:
        return wanted
    room = max(1, window_tokens - context_tokens)
    return room if wanted is None else min(wanted, room)
