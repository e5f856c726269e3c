"""Stable LatentMoE: sigmoid router on the full width, routed experts in a latent space (technical report eq. 11, 13).

Architecture facts (``text_config``):

- router: ``s = sigmoid(fp32(x) . gate^T)``; the ``num_experts_per_token`` largest of ``s + e_score_correction_bias``
  are chosen, and the bias never enters the weights ``p = s_T / (sum s_T + 1e-20) * routed_scaling_factor``.
- routed: ``z = routed_expert_down_proj(x)``; ``u = sum p_e w2_e(SiTU(w1_e z, w3_e z))`` summed in fp32, one cast;
  ``routed_expert_up_proj(RMS(u; routed_expert_norm))``.
- shared experts: one MLP of width ``num_shared_experts * moe_intermediate_size``, added without a gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from k3_sglang.config import MoEConfig, TextConfig
from k3_sglang.layers.expert_weights import ExpertFormat, PackedExperts, UnpackedExperts
from k3_sglang.layers.experts import run_experts
from k3_sglang.layers.norm import rms_norm
from k3_sglang.layers.parallel import Ranks, weight
from k3_sglang.layers.situ import situ_glu

if TYPE_CHECKING:
    from k3_sglang.layers.fused_experts import FusedExperts


def route(x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, moe: MoEConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts for each token.

    Args:
        x: [T, C] normed input.
        gate: [E, C] fp32 router weight.
        bias: [E] fp32 correction bias, used for the choice only.

    Returns:
        ids [T, k] int64 and weights [T, k] fp32.
    """
    scores = torch.sigmoid(F.linear(x.float(), gate))
    ids = torch.topk(scores + bias, moe.experts_per_token, dim=-1, sorted=False).indices
    weights = scores.gather(-1, ids)
    if moe.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).add_(1e-20)
    if moe.routed_scaling_factor != 1.0:
        weights = weights * moe.routed_scaling_factor
    return ids, weights


def _make_experts(
    config: TextConfig, ranks: Ranks, experts: ExpertFormat, layer: int
) -> UnpackedExperts | PackedExperts | FusedExperts:
    if experts == "fused":
        from k3_sglang.layers.fused_experts import FusedExperts  # loads SGLang's MoE layers; only a GPU has them

        return FusedExperts(config.moe, config.situ, layer, ranks)
    return PackedExperts(config.moe, ranks) if experts == "packed" else UnpackedExperts(config.moe, ranks)


class LatentMoE(torch.nn.Module):
    """Routed experts behind a latent projection plus shared experts; ranks hold whole experts or parts of each."""

    def __init__(self, config: TextConfig, ranks: Ranks, experts: ExpertFormat, layer: int) -> None:
        super().__init__()
        moe = config.moe
        self.moe = moe
        self.situ = config.situ
        self.eps = config.rms_norm_eps
        self._ranks = ranks
        shared_width = ranks.share(moe.shared_intermediate_size, "shared expert width")
        self.in_sizes = (moe.latent_size, 2 * shared_width)
        """Rows of ``in_proj``: routed_expert_down_proj, shared gate|up."""

        self.gate = weight(moe.num_experts, config.hidden_size, dtype=torch.float32)
        self.e_score_correction_bias = weight(moe.num_experts, dtype=torch.float32)
        self.in_proj = weight(sum(self.in_sizes), config.hidden_size)
        self.experts = _make_experts(config, ranks, experts, layer)
        self.routed_expert_norm = weight(moe.latent_size)
        self.up_proj = weight(config.hidden_size, moe.latent_size)
        self.shared_down_proj = weight(config.hidden_size, shared_width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] to [T, C]."""
        ids, weights = route(x, self.gate, self.e_score_correction_bias, self.moe)
        latent, shared_gate_up = F.linear(x, self.in_proj).split(self.in_sizes, dim=-1)
        if isinstance(self.experts, (UnpackedExperts, PackedExperts)):
            routed = run_experts(latent, ids, weights, self.experts, self.situ)
        else:
            routed = self.experts(latent, ids, weights)
        routed = rms_norm(self._ranks.all_reduce(routed).to(x.dtype), self.routed_expert_norm, self.eps)
        shared = F.linear(situ_glu(shared_gate_up, self.situ), self.shared_down_proj)
        return F.linear(routed, self.up_proj) + self._ranks.all_reduce(shared)
