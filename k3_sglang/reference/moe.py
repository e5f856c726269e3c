"""Stable LatentMoE: sigmoid router, routed experts in a latent space, one shared MLP."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3_sglang.config import TextConfig
from k3_sglang.reference.ops import Weights, mlp, rms_norm


class MoE:
    """Mixture of experts of one layer; ``experts.{w1,w2,w3}`` are stacked over experts and unpacked."""

    def __init__(self, config: TextConfig, weights: Weights) -> None:
        self.moe, self.situ, self.eps, self.w = config.moe, config.situ, config.rms_norm_eps, weights
        self.router = weights["gate.weight"].float()

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts chosen for each token and their weights, both [T, experts_per_token], float32 weights.

        The correction bias takes part in the choice only.
        """
        scores = torch.sigmoid(F.linear(x.float(), self.router))
        corrected = scores + self.w["gate.e_score_correction_bias"]
        chosen = torch.topk(corrected, self.moe.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.moe.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.moe.routed_scaling_factor

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        w = self.w
        latent = F.linear(x, w["routed_expert_down_proj.weight"])
        routed = torch.zeros_like(latent, dtype=torch.float32)
        chosen, weights = self.route(x)
        for expert in chosen.unique().tolist():
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            w1, w2, w3 = w["experts.w1"][expert], w["experts.w2"][expert], w["experts.w3"][expert]
            output = mlp(latent[tokens], w1, w3, w2, self.situ)
            routed.index_add_(0, tokens, output.float() * weights[tokens, place].unsqueeze(-1))
        normed = rms_norm(routed.to(x.dtype), w["routed_expert_norm.weight"], self.eps)
        shared = [w[f"shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down")]
        return F.linear(normed, w["routed_expert_up_proj.weight"]) + mlp(x, *shared, config=self.situ)
