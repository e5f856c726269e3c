"""How two sets of numbers are compared, and how far apart they may be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Agreement:
    """Distributions over the vocabulary at some positions, against those of the reference."""

    positions: int
    top1: float
    """Share of positions whose most likely token is the same."""
    max_abs: float
    """Largest difference of a log-probability (natural logarithm), over all positions and all tokens."""
    mean_abs: float

    def within(self, limits: Limits) -> bool:
        """Whether every figure is on the right side of its limit."""
        return self.top1 >= limits.top1 and self.max_abs <= limits.max_abs and self.mean_abs <= limits.mean_abs


@dataclass(frozen=True)
class Limits:
    """What still counts as equal."""

    top1: float
    max_abs: float
    mean_abs: float


FP32 = Limits(top1=1.0, max_abs=1e-3, mean_abs=1e-3)
"""float32 without TF32."""

BF16 = Limits(top1=0.95, max_abs=3.0, mean_abs=0.10)
"""bfloat16 against the bfloat16 reference: one flipped routing decision moves one position by much."""

LIMITS = {"float32": FP32, "bfloat16": BF16}

MAX_RELATIVE_ERROR = 1e-4
"""Of one tensor inside the model in float32: largest difference over largest value."""

MAX_ROUTER_WEIGHT_ERROR = 1e-5
MAX_FEATURE_ERROR = 3e-6
"""Of vision features in float32, absolute."""


def agreement(log_probs: Tensor, reference_logits: Tensor) -> Agreement:
    """Compare distributions.

    Args:
        log_probs: [n, vocab] natural logarithms of probabilities.
        reference_logits: [n, vocab] in any float dtype.

    Raises:
        ValueError: different shapes, or nothing to compare.
    """
    if log_probs.shape != reference_logits.shape or not log_probs.numel():
        raise ValueError(
            f"{tuple(log_probs.shape)} log-probabilities against {tuple(reference_logits.shape)} logits; both must be "
            "[positions, vocab] with at least one position"
        )
    wanted = torch.log_softmax(reference_logits.double(), -1)
    difference = (log_probs.double() - wanted).abs()
    same = log_probs.argmax(-1) == wanted.argmax(-1)
    return Agreement(
        positions=len(same),
        top1=same.double().mean().item(),
        max_abs=difference.max().item(),
        mean_abs=difference.mean().item(),
    )


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference over largest wanted value.

    Raises:
        ValueError: different shapes.
    """
    if got.shape != wanted.shape:
        raise ValueError(f"shape {tuple(got.shape)} against {tuple(wanted.shape)} of the reference")
    return ((got.float() - wanted.float()).abs().max() / wanted.float().abs().max()).item()
