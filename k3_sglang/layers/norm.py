"""RMSNorm in the released rounding order: normalise in fp32, round to the model dtype, then multiply by the weight."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * cast(x * rsqrt(mean(x^2) + eps))`` over the last axis.

    Args:
        x: [..., C] in the model dtype.
        weight: [C] in the model dtype.
        eps: added to the mean square (``rms_norm_eps``, or 1e-6 for the two MLA latent norms).
    """
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * inverse).to(x.dtype) * weight
