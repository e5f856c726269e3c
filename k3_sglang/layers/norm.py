"""RMSNorm in the released rounding order, and the gated norm of KDA's output."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * cast(x * rsqrt(mean(x^2) + eps))`` over the last axis: fp32, rounded once, weight in the model dtype.

    Args:
        x: [..., C] in the model dtype.
        weight: [C] in the model dtype.
        eps: added to the mean square (``rms_norm_eps``, or 1e-6 for the two MLA latent norms).
    """
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * inverse).to(x.dtype) * weight


def gated_rms_norm(o: torch.Tensor, gate: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``RMSNorm(o) * weight * sigmoid(gate)``, all fp32 with one final cast.

    Args:
        o: [T, H, V] in the model dtype.
        gate: [T, H * V] raw output gate.
        norm_weight: [V] fp32.

    Returns:
        [T, H * V] in the dtype of ``o``.
    """
    wide = o.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    normed = (wide * inverse).mul_(norm_weight).flatten(-2)
    return normed.mul_(torch.sigmoid(gate.float())).to(o.dtype)
