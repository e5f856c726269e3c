"""The two attention layers: Kimi Delta Attention with a recurrent state, gated latent attention with a growing cache.

Both take the normed layer input x [T, hidden] of the next T tokens of one sequence and the state left by the tokens
before, change that state in place, and return [T, hidden]. Shapes: H heads, K = V head width, D = H * K, S all tokens.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from k3_sglang.config import KDA_L2NORM_EPS, MLA_LATENT_NORM_EPS, TextConfig
from k3_sglang.kernels.kda import kda_recurrent, l2norm
from k3_sglang.reference.ops import Weights, rms_norm

Trace = MutableMapping[str, Tensor]
"""Where a forward pass notes intermediate values by name, when asked to."""


@dataclass
class KDAState:
    """What one KDA layer remembers of a sequence."""

    conv: Tensor
    """[3, 3 * D] last inputs of the short convolution, q | k | v, oldest first, model dtype."""
    recurrent: Tensor
    """[H, V, K] float32."""


@dataclass
class MLAState:
    """What one MLA layer remembers of a sequence: expanded keys and values, as the released code caches them."""

    keys: Tensor
    """[H, S, qk_head_dim] model dtype."""
    values: Tensor
    """[H, S, v_head_dim] model dtype."""


class KDA:
    """Kimi Delta Attention: short convolution, bounded gate, delta rule with a decay per key channel, output gate."""

    def __init__(self, config: TextConfig, weights: Weights) -> None:
        self.kda, self.eps, self.w = config.kda, config.rms_norm_eps, weights
        self.a = weights["A_log"][: self.kda.num_heads].exp()  # the rest of A_log is padding
        self.dt_bias = weights["dt_bias"].view(self.kda.num_heads, -1)
        self.taps = torch.cat([weights[f"{part}_conv1d.weight"] for part in "qkv"]).float()

    def new_state(self, like: Tensor) -> KDAState:
        """State before the first token."""
        heads, width = self.kda.num_heads, self.kda.head_dim
        conv = like.new_zeros(self.kda.conv_kernel_size - 1, self.kda.conv_channels)
        return KDAState(conv, torch.zeros(heads, width, width))

    def __call__(self, x: Tensor, state: KDAState) -> Tensor:
        w, length, heads = self.w, x.shape[0], self.kda.num_heads
        projected = torch.cat([F.linear(x, w[f"{part}_proj.weight"]) for part in "qkv"], -1)
        inputs = torch.cat((state.conv, projected))
        state.conv = inputs[length:]
        convolved = F.conv1d(inputs.float().t().unsqueeze(0), self.taps, groups=self.kda.conv_channels)[0].t()
        mixed = F.silu(convolved).to(x.dtype).float().view(length, 3, heads, -1)
        q, k, v = mixed.unbind(1)
        q = l2norm(q, KDA_L2NORM_EPS) * self.kda.head_dim**-0.5
        k = l2norm(k, KDA_L2NORM_EPS)

        z = F.linear(F.linear(x, w["f_a_proj.weight"]), w["f_b_proj.weight"]).float().view(length, heads, -1)
        g = self.kda.gate_lower_bound * torch.sigmoid(self.a.unsqueeze(-1) * (z + self.dt_bias))
        beta = torch.sigmoid(F.linear(x, w["b_proj.weight"]).float())
        output, state.recurrent = kda_recurrent(q, k, v, g, beta, state.recurrent)

        gate = torch.sigmoid(F.linear(x, w["g_proj.weight"]).float()).view(length, heads, -1)
        output = output.to(x.dtype).float()
        inverse = torch.rsqrt(output.square().mean(-1, keepdim=True) + self.eps)
        gated = output * inverse * w["o_norm.weight"].float() * gate
        return F.linear(gated.to(x.dtype).flatten(1), w["o_proj.weight"])


class MLA:
    """Gated multi-head latent attention without rotation, in expanded form."""

    def __init__(self, config: TextConfig, weights: Weights) -> None:
        self.mla, self.w = config.mla, weights

    def new_state(self, like: Tensor) -> MLAState:
        """State before the first token."""
        m = self.mla
        return MLAState(like.new_zeros(m.num_heads, 0, m.qk_head_dim), like.new_zeros(m.num_heads, 0, m.v_head_dim))

    def __call__(self, x: Tensor, state: MLAState, trace: Trace | None = None, name: str = "") -> Tensor:
        m, w, length = self.mla, self.w, x.shape[0]
        compressed = rms_norm(F.linear(x, w["q_a_proj.weight"]), w["q_a_layernorm.weight"], MLA_LATENT_NORM_EPS)
        q = F.linear(compressed, w["q_b_proj.weight"]).view(length, m.num_heads, -1).transpose(0, 1)

        latent, shared = F.linear(x, w["kv_a_proj_with_mqa.weight"]).split([m.kv_lora_rank, m.qk_rope_head_dim], -1)
        latent = rms_norm(latent, w["kv_a_layernorm.weight"], MLA_LATENT_NORM_EPS)
        if trace is not None:
            trace[f"{name}.mla_latent"] = torch.cat((latent, shared), -1)
        expanded = F.linear(latent, w["kv_b_proj.weight"]).view(length, m.num_heads, -1).transpose(0, 1)
        k_nope, v = expanded.split([m.qk_nope_head_dim, m.v_head_dim], -1)
        k = torch.cat((k_nope, shared.expand(m.num_heads, -1, -1)), -1)
        state.keys, state.values = torch.cat((state.keys, k), 1), torch.cat((state.values, v), 1)

        scores = q @ state.keys.transpose(1, 2) * m.scaling  # [H, T, S]
        if length > 1:
            total = scores.shape[-1]
            later = torch.ones(length, total, dtype=torch.bool).triu(total - length + 1)
            scores = scores.masked_fill(later, float("-inf"))
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype)
        attended = (weights @ state.values).transpose(0, 1).flatten(1)
        return F.linear(attended * torch.sigmoid(F.linear(x, w["g_proj.weight"])), w["o_proj.weight"])
