"""Kimi Delta Attention layer: projections around a recurrent state (technical report eq. 1, 2, 5, 6).

Architecture facts (``linear_attn_config``):

- q, k, v pass a causal depthwise convolution of width 4 and SiLU; q and k are l2-normalised, q scaled by D^-0.5.
- decay: ``g = lower_bound * sigmoid(exp(A_log) * (f_b(f_a(x)) + dt_bias))`` per channel, in (-5, 0); ``b`` sigmoid.
- state [H, V, K] fp32: ``S <- diag(exp g) S; S <- S + k (b (v - S^T k))^T; o = S^T q``.
- output: per-head RMSNorm of o, times sigmoid of the full-rank gate, then ``o_proj``.

This file holds the projections and the gated norm; convolution and recurrence run in the attention backend, which
owns the state pool.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from k3_sglang.compat import RadixLinearAttention
from k3_sglang.config import TextConfig
from k3_sglang.layers.norm import gated_rms_norm
from k3_sglang.layers.parallel import Ranks, weight


class KDALayer(torch.nn.Module):
    """One KDA attention block; heads are split over tensor-parallel ranks."""

    def __init__(self, config: TextConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        kda = config.kda
        self.heads = ranks.share(kda.num_heads, "KDA heads")
        self.head_dim = kda.head_dim
        self.width = self.heads * kda.head_dim
        self.eps = config.rms_norm_eps
        self._ranks = ranks
        self.in_sizes = (3 * self.width, self.width, self.head_dim, self.heads)
        """Rows of ``in_proj``: q|k|v, output gate, f_a, beta."""

        self.in_proj = weight(sum(self.in_sizes), config.hidden_size)
        self.f_b_proj = weight(self.width, self.head_dim)
        self.conv = weight(3 * self.width, kda.conv_kernel_size, dtype=torch.float32)
        self.A_log = weight(self.heads, dtype=torch.float32)
        self.dt_bias = weight(self.width, dtype=torch.float32)
        self.o_norm = weight(self.head_dim, dtype=torch.float32)
        self.o_proj = weight(config.hidden_size, self.width)
        self.attn = RadixLinearAttention(
            layer_id=layer,
            num_q_heads=self.heads,
            num_k_heads=self.heads,
            num_v_heads=self.heads,
            head_q_dim=self.head_dim,
            head_k_dim=self.head_dim,
            head_v_dim=self.head_dim,
            conv_weights=self.conv,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=kda.gate_lower_bound,
        )
        self.attn.cpu_constants = None  # derived by the CPU backend on first use, dropped when weights change

    def forward(self, x: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        """[T, C] normed input to [T, C] attention output."""
        qkv, output_gate, f_a, beta = F.linear(x, self.in_proj).split(self.in_sizes, dim=-1)
        forget = F.linear(f_a, self.f_b_proj)
        if not forward_batch.forward_mode.is_decode():
            forget = forget.unflatten(-1, (self.heads, self.head_dim)).unsqueeze(0)
        o = self.attn(forward_batch, mixed_qkv=qkv, a=forget, b=beta.unsqueeze(0))  # [1, T, H, V]
        gated = gated_rms_norm(o.view(-1, self.heads, self.head_dim), output_gate, self.o_norm, self.eps)
        return self._ranks.all_reduce(F.linear(gated, self.o_proj))
