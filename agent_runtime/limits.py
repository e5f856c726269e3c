"""Bounds of one run: steps, tokens, time, tool calls, and how often what went wrong is tried again."""

from __future__ import annotations

from dataclasses import dataclass

from agent_runtime.repeats import RepeatLimits


@dataclass(frozen=True, slots=True)
class Retries:
    """How often one step asks again. Every attempt sends the same bytes, so the engine has its whole prompt cached."""

    failures: int = 2
    """After a broken stream or a server error."""
    unusable: int = 1
    """After an empty answer, one with a call outside of the calls, or one that is no valid API answer."""
    misfires: int = 0
    """After a turn whose calls all name unknown tools or have wrong arguments. Such a turn is then not kept: with many
    tools a model that reads its own wrong calls repeats them. 0 lets the model read what was wrong."""
    backoff_s: float = 0.5
    """Pause before the first retry after a failure; doubled for each further one."""
    longest_pause_s: float = 60.0
    """Longest pause, also when the endpoint asks for a longer one."""

    def pause_s(self, failures: int, asked_s: float | None = None) -> float:
        """Seconds to wait after so many failures; what the endpoint asks for, if that is longer."""
        return min(self.longest_pause_s, max(self.backoff_s * 2 ** (failures - 1), asked_s or 0.0))

    def __post_init__(self) -> None:
        for name in ("failures", "unusable", "misfires", "backoff_s", "longest_pause_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}, must be at least 0")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one run. None means no bound."""

    max_steps: int = 50
    token_budget: int | None = None
    """Tokens that had to be computed (uncached prompt plus answer), summed up and checked after each step."""
    time_budget_s: float | None = None
    """Seconds for the whole run; whatever is going on then is cancelled."""
    tool_calls: int | None = None
    """Calls that may be run; further ones of the same turn are answered with the reason, then the run ends."""
    output_tries: int = 3
    """Answers asked for in a wanted form before the run ends with `invalid_output`."""
    repeats: RepeatLimits = RepeatLimits()
    retries: Retries = Retries()

    def __post_init__(self) -> None:
        for name in ("max_steps", "output_tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, must be at least 1")
        if self.tool_calls is not None and self.tool_calls < 0:
            raise ValueError(f"tool_calls={self.tool_calls}, must be at least 0")
