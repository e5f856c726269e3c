"""FLOPs of computing a span of a prompt, and the time to first token that follows at a stated speed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from k3_sglang import costs
from k3_sglang.cache.replay.driver import Served
from k3_sglang.config import TextConfig


@dataclass(frozen=True)
class Speed:
    """How fast prefill is, as a product of stated numbers; queueing is not modelled."""

    flops_per_s: float
    """Achieved by all devices of the rank group together."""
    chunk_overhead_s: float = 0.02
    """Fixed cost of one forward pass."""


@dataclass(frozen=True)
class PromptCost:
    """FLOPs as ``base`` per token and ``slope`` per token and position of context."""

    base: float
    slope: float

    @classmethod
    def of(cls, text: TextConfig) -> PromptCost:
        """From the model's dimensions (``costs.flops_per_token`` is linear in the context)."""
        base = costs.flops_per_token(text, 0)
        return cls(float(base), float(costs.flops_per_token(text, 1) - base))

    def span(self, start: int, end: int) -> float:
        """FLOPs of the tokens ``start .. end``."""
        return self.base * (end - start) + self.slope * (end * (end + 1) - start * (start + 1)) / 2

    def first_token_s(self, served: Served, speed: Speed) -> float:
        """Seconds of prefill of one request."""
        flops = self.span(served.hit_tokens, served.prompt_tokens)
        return flops / speed.flops_per_s + served.chunks * speed.chunk_overhead_s


@dataclass(frozen=True)
class Times:
    """Distribution of the time to first token, seconds."""

    mean: float
    p50: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Times:
        """Mean and quantiles by nearest rank."""
        ordered = sorted(values)

        def at(share: float) -> float:
            return ordered[min(int(len(ordered) * share), len(ordered) - 1)]

        return cls(statistics.fmean(ordered), at(0.5), at(0.95))
