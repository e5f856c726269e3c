"""Pointwise pieces of the model: norms, the SiTU activation, the Attention Residuals mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from k3_sglang.config import SituConfig

Weights = Mapping[str, Tensor]
"""Tensors of one block by their name in the checkpoint, without the block's prefix."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise in float32, round to the model dtype, then multiply by the weight in the model dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def situ(gate: Tensor, up: Tensor, config: SituConfig) -> Tensor:
    """SiTU-GLU in float32, rounded once: ``[b tanh(g / b) sigmoid(g)] * [c tanh(u / c)]``."""
    g, u = gate.float(), up.float()
    activated = config.beta * torch.tanh(g / config.beta) * torch.sigmoid(g)
    return (activated * (config.linear_beta * torch.tanh(u / config.linear_beta))).to(gate.dtype)


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, config: SituConfig) -> Tensor:
    """Gated feed-forward: ``down(SiTU(gate(x), up(x)))``."""
    return F.linear(situ(F.linear(x, gate), F.linear(x, up), config), down)


def mixture(rows: Sequence[Tensor], norm_weight: Tensor, projection: Tensor, eps: float) -> Tensor:
    """Attention Residuals: softmax mixture over the raw rows; the norm only affects the scores. All in float32.

    Args:
        rows: frozen bank rows and the running stream, each [T, hidden].
        norm_weight: [hidden]. projection: [1, hidden].

    Returns:
        [T, hidden] in the rows' dtype.
    """
    stacked = torch.stack(tuple(rows)).float()
    normed = stacked * torch.rsqrt(stacked.square().mean(-1, keepdim=True) + eps)
    scores = normed @ (norm_weight.float() * projection[0].float())  # [R, T]
    return (torch.softmax(scores, 0).unsqueeze(-1) * stacked).sum(0).to(rows[0].dtype)
