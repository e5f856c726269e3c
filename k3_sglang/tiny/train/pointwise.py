"""Pointwise pieces of the trainable model: norms, SiTU, the Attention Residuals mixture. All float32."""

from __future__ import annotations

import torch
from torch import Tensor

from k3_sglang.tiny.train.fusion import fused


@fused
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / rms(x)`` over the last axis."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


@fused
def situ(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU-GLU of a projection [..., 2 I] that holds gate, then up: ``[b tanh(g/b) sigmoid(g)] * [c tanh(u/c)]``."""
    gate, up = gate_up.chunk(2, -1)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate)) * (linear_beta * torch.tanh(up / linear_beta))


@fused
def mix_norm(rows: list[Tensor], score: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of the softmax mixture of raw rows, what every sub-layer reads.

    Args:
        rows: frozen bank rows and the running stream, each [..., hidden].
        score: [hidden], product of the mixture's norm weight and projection.
        weight: [hidden] of the norm that follows.
    """
    scores = [
        (row * score).sum(-1, keepdim=True) * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps) for row in rows
    ]
    shares = torch.softmax(torch.cat(scores, -1), -1)
    mixed = sum((shares[..., i : i + 1] * row for i, row in enumerate(rows)), torch.zeros_like(rows[0]))
    return weight * (mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + eps))


@fused
def gated(x: Tensor, gate: Tensor) -> Tensor:
    """``x * sigmoid(gate)``."""
    return x * torch.sigmoid(gate)


@fused
def norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """KDA's output gate: RMS norm of each head of x [B, T, H, V] times ``sigmoid(gate)`` [B, T, H V]."""
    normed = weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    return normed.flatten(-2) * torch.sigmoid(gate)
