"""Routed experts on a CPU: gathered batched matmuls for a few tokens, one pass per expert for many."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from k3_sglang.config import SituConfig
from k3_sglang.layers.situ import situ_glu

GATHER_MAX_PAIRS = 32
"""Up to this many (token, expert) pairs, copying the chosen experts' weights beats a Python loop over experts."""


def run_experts(
    latent: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    situ: SituConfig,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' outputs.

    Args:
        latent: [T, L] in the model dtype.
        ids: [T, k] chosen experts.
        weights: [T, k] fp32 mixing weights.
        w13: [E, 2 * I, L], w1 (gate) rows first, then w3 (up).
        w2: [E, L, I].

    Returns:
        [T, L] fp32; expert outputs are rounded to the model dtype before the fp32 sum, as released.
    """
    if ids.numel() <= GATHER_MAX_PAIRS:
        return _gathered(latent, ids, weights, w13, w2, situ)
    return _per_expert(latent, ids, weights, w13, w2, situ)


def _gathered(
    latent: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    situ: SituConfig,
) -> torch.Tensor:
    num_tokens, chosen = ids.shape
    flat = ids.reshape(-1)
    inputs = latent.unsqueeze(1).expand(-1, chosen, -1).reshape(num_tokens * chosen, -1, 1)
    act = situ_glu(torch.bmm(w13[flat], inputs).squeeze(-1), situ)
    out = torch.bmm(w2[flat], act.unsqueeze(-1)).view(num_tokens, chosen, -1)
    return torch.bmm(weights.unsqueeze(1), out.float()).squeeze(1)


def _per_expert(
    latent: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    situ: SituConfig,
) -> torch.Tensor:
    num_tokens, chosen = ids.shape
    order = ids.reshape(-1).argsort(stable=True)
    tokens = order // chosen
    inputs = latent[tokens]
    out = torch.empty(order.numel(), w2.shape[1], dtype=latent.dtype, device=latent.device)
    start = 0
    for expert, count in enumerate(torch.bincount(ids.reshape(-1), minlength=w13.shape[0]).tolist()):
        if not count:
            continue
        rows = slice(start, start + count)
        act = situ_glu(F.linear(inputs[rows], w13[expert]), situ)
        out[rows] = F.linear(act, w2[expert])
        start += count
    paired = torch.empty_like(out)
    paired[order] = out
    return torch.bmm(weights.unsqueeze(1), paired.view(num_tokens, chosen, -1).float()).squeeze(1)
