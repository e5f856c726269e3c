"""Kimi Delta Attention layer: projections around a recurrent state (technical report eq. 1, 2, 5, 6).

Architecture facts (``linear_attn_config``):

- q, k, v pass a causal depthwise convolution of width 4 and SiLU; q and k are l2-normalised, q scaled by D^-0.5.
- decay: ``g = lower_bound * sigmoid(exp(A_log) * (f_b(f_a(x)) + dt_bias))`` per channel, in (-5, 0); ``b`` sigmoid.
- state [H, V, K] fp32: ``S <- diag(exp g) S; S <- S + k (b (v - S^T k))^T; o = S^T q``.
- output: per-head RMSNorm of o, times sigmoid of the full-rank gate, then ``o_proj``.

This file holds the projections and the gated norm; convolution and recurrence run in the attention backend, which
owns the state pool. What a backend reads of ``attn``, and gets per pass; the CPU's and SGLang's read the same:

| name | shape, dtype | SGLang's backend (``layers/attention/linear/kda_backend.py``, ``kernels/kda_triton.py``) |
|---|---|---|
| ``conv_weights`` | [3HK, 4] fp32, q, k, v rows | ``causal_conv1d_fn`` / ``_update`` over pools of [slots, 3, 3HK] |
| ``bias`` | None | no convolution bias |
| ``A_log`` | [H] fp32 | one value a head, any shape (SGLang's layer has [1, 1, H, 1]) |
| ``dt_bias`` | [HK] fp32 | flat, added to ``a`` in the kernel |
| ``lower_bound`` | -5.0 | chooses ``lower_bound * sigmoid(exp(A_log) * z)`` over the softplus gate |
| ``mixed_qkv`` | [T, 3HK], rows may be strided | raw projections; convolution and SiLU happen in the backend |
| ``a`` | decode [B, HK], extend [1, T, H, K] | raw forget gate z without ``dt_bias`` |
| ``b`` | [1, T, H], rows may be strided | raw, the kernel applies the sigmoid |
| state pool | [slots, H, V, K] fp32, V first | owned by the backend |
| result | [1, T, H, V] in the model dtype | the gated norm is ours (SGLang's optional fused one is not offered) |

Rows of ``in_proj`` are padded to a multiple of 8, so that every slice of its output starts on 16 bytes.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

from k3_sglang.compat import RadixLinearAttention
from k3_sglang.config import TextConfig
from k3_sglang.layers.norm import gated_rms_norm
from k3_sglang.layers.parallel import Ranks, weight

ROW_MULTIPLE: Final = 8
"""Values of 2 bytes in 16."""


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
        sizes = (3 * self.width, self.width, self.head_dim, self.heads)
        self.in_sizes = (*sizes, -sum(sizes) % ROW_MULTIPLE)
        """Rows of ``in_proj``: q|k|v, output gate, f_a, beta, padding."""

        self.in_proj = weight(sum(self.in_sizes), config.hidden_size)
        self.in_proj.data[sum(sizes) :].zero_()
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
        qkv, output_gate, f_a, beta, _ = F.linear(x, self.in_proj).split(self.in_sizes, dim=-1)
        forget = F.linear(f_a, self.f_b_proj)
        # As the backend dispatches: a decode batch may be labelled as an extend of one token per sequence.
        if not forward_batch.logical_forward_mode.is_decode():
            forget = forget.unflatten(-1, (self.heads, self.head_dim)).unsqueeze(0)
        o = self.attn(forward_batch, mixed_qkv=qkv, a=forget, b=beta.unsqueeze(0))  # [1, T, H, V]
        gated = gated_rms_norm(o.view(-1, self.heads, self.head_dim), output_gate, self.o_norm, self.eps)
        return self._ranks.all_reduce(F.linear(gated, self.o_proj))
