"""What a training run is: stages of data, sizes, learning rate over time. JSON in the run's directory."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from k3_sglang.tiny.train.optimiser import OptimiserConfig

PLAN_FILE: Final = "plan.json"


@dataclass(frozen=True)
class Stage:
    """One part of the curriculum."""

    mix: str
    """Name the data source knows."""
    tokens: int
    """Tokens to train on, counted without padding."""
    max_len: int = 1536
    """Longest conversation, in tokens."""
    step_tokens: int = 0
    """Tokens per optimiser step, at least; 0: the plan's."""
    rate: float = 1.0
    """Factor on the plan's learning rate, for steps of another size."""


@dataclass(frozen=True)
class Plan:
    """All that determines a run's result, up to the number of threads."""

    stages: tuple[Stage, ...]
    source: str = "world"
    """``world``: the tiny model's conversations; ``copy``: random strings, to compare settings."""
    seed: int = 0
    step_tokens: int = 8192
    """Tokens per optimiser step, at least."""
    batch_tokens: int = 2048
    """Tokens, padding included, computed together; one conversation may be longer."""
    learning_rate: float = 6e-3
    warmup_steps: int = 50
    decay_fraction: float = 0.3
    """Last part of the tokens, in which the learning rate falls to ``final_rate``."""
    final_rate: float = 0.02
    """Learning rate at the end, as a share of the full one."""
    max_norm: float = 1.0
    z_loss: float = 1e-4
    balance_rate: float = 1e-2
    """Step of the router's correction bias."""
    quantise_from: float = 0.5
    """Share of the tokens after which the routed experts are rounded to MXFP4 in the forward pass."""
    bf16: bool = False
    """Matrix products in bfloat16: faster on CPUs that have them (AVX512-BF16, AMX)."""
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)

    @property
    def tokens(self) -> int:
        """Tokens of all stages."""
        return sum(stage.tokens for stage in self.stages)

    def stage_at(self, tokens: int) -> int:
        """Number of the stage that the next token belongs to; the number of stages at the end."""
        for number, stage in enumerate(self.stages):
            tokens -= stage.tokens
            if tokens < 0:
                return number
        return len(self.stages)

    def rate_at(self, step: int, tokens: int) -> float:
        """Learning rate: linear warm-up, constant, then a cosine down to ``final_rate``; times the stage's factor."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        start = self.tokens * (1 - self.decay_fraction)
        share = min(1.0, max(0.0, (tokens - start) / (self.tokens - start))) if self.decay_fraction else 0.0
        falling = self.final_rate + (1 - self.final_rate) * 0.5 * (1 + math.cos(math.pi * share))
        stage = self.stages[min(self.stage_at(tokens), len(self.stages) - 1)]
        return self.learning_rate * stage.rate * warm * falling

    def save(self, directory: Path) -> None:
        """Write ``plan.json``."""
        (directory / PLAN_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan; unknown keys are errors.

        Raises:
            ValueError: the file has a key or a value this version does not know.
        """
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, KeyError) as error:
            raise ValueError(f"{path}: not a training plan: {error}") from error

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Plan:
        """Build from what ``asdict`` gave."""
        optimiser = dict(raw.pop("optimiser", {}))
        if "betas" in optimiser:
            first, second = optimiser["betas"]
            optimiser["betas"] = (first, second)
        stages = tuple(Stage(**stage) for stage in raw.pop("stages"))
        return cls(stages=stages, optimiser=OptimiserConfig(**optimiser), **raw)
