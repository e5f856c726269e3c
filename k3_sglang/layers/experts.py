"""Routed experts on a CPU: token by token over views of the weights for a few tokens, grouped by expert for many."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from k3_sglang.config import SituConfig
from k3_sglang.layers.expert_weights import ExpertWeights
from k3_sglang.layers.situ import situ_glu

PER_TOKEN_MAX = 2
"""Up to this many tokens, going token by token beats sorting tokens by expert (a third of the time for one token)."""

MAX_PADDING = 3
"""Padded rows per real row up to which one batched matmul over all experts beats one matmul per expert."""


def run_experts(
    latent: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights,
    situ: SituConfig,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' outputs.

    Args:
        latent: [T, L] in the model dtype.
        ids: [T, k] chosen experts.
        weights: [T, k] fp32 mixing weights.
        experts: their weights.

    Returns:
        [T, L] fp32, the part of the experts that this rank holds; expert outputs are rounded to the model dtype before
        the fp32 sum, as released.
    """
    if ids.shape[0] <= PER_TOKEN_MAX:
        return _per_token(latent, ids, weights, experts, situ)
    return _grouped(latent, ids, weights, experts, situ)


def _per_token(
    latent: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, situ: SituConfig
) -> torch.Tensor:
    """Token after token over the weights of its experts: none of them is copied."""
    sums = []
    for token, chosen in enumerate(ids.tolist()):
        row = latent[token : token + 1]
        here = [i for i, expert in enumerate(chosen) if expert in experts.held]
        if not here:
            sums.append(torch.zeros_like(row, dtype=torch.float32))
            continue
        matrices = [experts.one(chosen[i]) for i in here]
        act = situ_glu(torch.cat([F.linear(row, w13) for w13, _ in matrices]), situ)  # [k, I]
        out = torch.cat([F.linear(act[i : i + 1], w2) for i, (_, w2) in enumerate(matrices)])  # [k, L]
        shares = weights[token : token + 1] if len(here) == len(chosen) else weights[token : token + 1, here]
        sums.append(torch.mm(shares, out.float()))
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def _grouped(
    latent: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, situ: SituConfig
) -> torch.Tensor:
    """Tokens sorted by expert; experts with equal padding in one batched matmul, or one after the other."""
    num_tokens, chosen = ids.shape
    places = ids.reshape(-1) - experts.held.start
    order = places.argsort(stable=True)
    if len(experts.held) < experts.total:
        order = order[(places[order] >= 0) & (places[order] < len(experts.held))]
    places = places[order]
    counts = torch.bincount(places, minlength=len(experts.held))
    rows = latent[order // chosen]
    longest = int(counts.max())
    if 0 < len(experts.held) * longest <= MAX_PADDING * order.numel():
        out = _batched(rows, places, counts, longest, experts, situ)
    else:
        out = _one_by_one(rows, counts.tolist(), experts, situ)
    paired = latent.new_zeros(num_tokens * chosen, latent.shape[1])
    paired[order] = out
    return torch.bmm(weights.unsqueeze(1), paired.view(num_tokens, chosen, -1).float()).squeeze(1)


def _batched(
    rows: torch.Tensor,
    places: torch.Tensor,
    counts: torch.Tensor,
    longest: int,
    experts: ExpertWeights,
    situ: SituConfig,
) -> torch.Tensor:
    """Outputs [P, L] of P rows sorted by expert, every expert padded to ``longest`` rows; ``places`` [P] of experts."""
    starts = counts.cumsum(0) - counts
    slot = torch.arange(rows.shape[0], device=rows.device) - starts[places] + places * longest
    padded = rows.new_zeros(counts.numel() * longest, rows.shape[1])
    padded[slot] = rows
    w13, w2 = experts.all()
    act = situ_glu(torch.bmm(padded.view(counts.numel(), longest, -1), w13.transpose(1, 2)), situ)
    return torch.bmm(act, w2.transpose(1, 2)).flatten(0, 1)[slot]


def _one_by_one(rows: torch.Tensor, counts: list[int], experts: ExpertWeights, situ: SituConfig) -> torch.Tensor:
    """Outputs [P, L] of P rows sorted by expert, computing only experts that have rows."""
    outputs = [rows[:0]]
    for expert, part in zip(experts.held, rows.split(counts), strict=True):
        if part.shape[0]:
            w13, w2 = experts.one(expert)
            outputs.append(F.linear(situ_glu(F.linear(part, w13), situ), w2))
    return torch.cat(outputs)
