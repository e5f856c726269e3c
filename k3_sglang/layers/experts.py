"""Routed experts on a CPU: token by token over views of the weights for a few tokens, grouped by expert for many."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from k3_sglang.config import SituConfig
from k3_sglang.layers.situ import situ_glu

PER_TOKEN_MAX = 2
"""Up to this many tokens, going token by token beats sorting tokens by expert (a third of the time for one token)."""

MAX_PADDING = 3
"""Padded rows per real row up to which one batched matmul over all experts beats one matmul per expert."""


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
    if ids.shape[0] <= PER_TOKEN_MAX:
        return _per_token(latent, ids, weights, w13, w2, situ)
    return _grouped(latent, ids, weights, w13, w2, situ)


def _per_token(
    latent: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    situ: SituConfig,
) -> torch.Tensor:
    """Token after token over views of its experts: no weight is copied."""
    sums = []
    for token, chosen in enumerate(ids.tolist()):
        row = latent[token : token + 1]
        act = situ_glu(torch.cat([F.linear(row, w13[expert]) for expert in chosen]), situ)  # [k, I]
        out = torch.cat([F.linear(act[i : i + 1], w2[expert]) for i, expert in enumerate(chosen)])  # [k, L]
        sums.append(torch.mm(weights[token : token + 1], out.float()))
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def _grouped(
    latent: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    situ: SituConfig,
) -> torch.Tensor:
    """Tokens sorted by expert; experts with equal padding in one batched matmul, or one after the other."""
    num_tokens, chosen = ids.shape
    num_experts = w13.shape[0]
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    rows = latent[order // chosen]
    longest = int(counts.max())
    if num_experts * longest <= MAX_PADDING * order.numel():
        out = _batched(rows, flat[order], counts, longest, w13, w2, situ)
    else:
        out = _one_by_one(rows, counts.tolist(), w13, w2, situ)
    paired = torch.empty_like(out)
    paired[order] = out
    return torch.bmm(weights.unsqueeze(1), paired.view(num_tokens, chosen, -1).float()).squeeze(1)


def _batched(
    rows: torch.Tensor,
    experts: torch.Tensor,
    counts: torch.Tensor,
    longest: int,
    w13: torch.Tensor,
    w2: torch.Tensor,
    situ: SituConfig,
) -> torch.Tensor:
    """Outputs [P, L] of P rows sorted by expert, every expert padded to ``longest`` rows."""
    starts = counts.cumsum(0) - counts
    place = torch.arange(rows.shape[0], device=rows.device) - starts[experts] + experts * longest
    padded = rows.new_zeros(counts.numel() * longest, rows.shape[1])
    padded[place] = rows
    act = situ_glu(torch.bmm(padded.view(counts.numel(), longest, -1), w13.transpose(1, 2)), situ)
    return torch.bmm(act, w2.transpose(1, 2)).flatten(0, 1)[place]


def _one_by_one(
    rows: torch.Tensor, counts: list[int], w13: torch.Tensor, w2: torch.Tensor, situ: SituConfig
) -> torch.Tensor:
    """Outputs [P, L] of P rows sorted by expert, computing only experts that have rows."""
    outputs = []
    for expert, part in enumerate(rows.split(counts)):
        if part.shape[0]:
            outputs.append(F.linear(situ_glu(F.linear(part, w13[expert]), situ), w2[expert]))
    return torch.cat(outputs)
