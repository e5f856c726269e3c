"""Absorbed multi-head latent attention in plain PyTorch: every head attends to one shared latent per token.

With ``k_nope = W_k c`` and ``v = W_v c`` the score of a query is ``(q_nope W_k) c + q_rope k_rope``: fold W_k into the
query, keep [c ; k_rope] (R values per token) as key, its first C values as value, and apply W_v to the result.
K3 rotates nothing. Softmax is float32; products are in the inputs' dtype.

Axes: T new tokens, B sequences, H heads, S tokens attended to, C ``kv_lora_rank``, R = C + shared key part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_SCORE_ELEMENTS: Final = 1 << 20
"""Scores held at a time by :func:`mla_prefill` (4 MiB in float32)."""

_MAX_BLOCK: Final = 64
"""Most queries per block: above this, work above the diagonal outgrows what larger products save."""

_PADDED_ELEMENTS: Final = 1 << 24
"""Most latent values :func:`mla_decode` gathers into one padded batch (64 MiB in float32)."""

_PADDING_ROWS_PER_SEQUENCE: Final = 1000
"""Padding rows that cost about as much as handling one more sequence by itself."""


def mla_prefill(q: Tensor, latent: Tensor, prefix_len: int, kv_lora_rank: int, scale: float) -> Tensor:
    """Causal attention of the new tokens of one sequence over its prefix and themselves.

    Args:
        q: [T, H, R] absorbed queries of the new tokens.
        latent: [S, R], prefix first, then the new tokens: S = prefix_len + T.
        prefix_len: tokens before the first new one.
        kv_lora_rank: C, the leading part of the latent that is the value.
        scale: softmax scale.

    Returns:
        [T, H, C] in q's dtype: attention over latents, before the value projection.

    Raises:
        ValueError: ``latent`` is not prefix_len + T rows long.
    """
    new_len, heads, width = q.shape
    if latent.shape[0] != prefix_len + new_len:
        raise ValueError(
            f"latent has {latent.shape[0]} rows; prefix_len {prefix_len} and {new_len} new tokens need "
            f"{prefix_len + new_len}"
        )
    keys, values = latent.t(), latent[:, :kv_lora_rank]
    out = q.new_empty(new_len, heads, kv_lora_rank)
    block = max(1, min(_MAX_BLOCK, _SCORE_ELEMENTS // (heads * max(1, latent.shape[0]))))
    for start in range(0, new_len, block):
        end = min(start + block, new_len)
        rows, visible = end - start, prefix_len + end
        scores = _scores(q[start:end].reshape(rows * heads, width), keys[:, :visible], scale)
        if rows > 1:
            later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu_(1)
            recent = scores.view(rows, heads, visible)[:, :, prefix_len + start :]
            recent.masked_fill_(later.unsqueeze(1), float("-inf"))
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        out[start:end] = (weights @ values[:visible]).view(rows, heads, kv_lora_rank)
    return out


def mla_decode(
    q: Tensor, latent_pool: Tensor, token_rows: Tensor, lengths: Sequence[int], kv_lora_rank: int, scale: float
) -> Tensor:
    """Attention of one new token of each of B sequences over all its tokens in a pool, the new one included.

    One sequence, or sequences of very different lengths, are handled one by one; others as one padded batch.

    Args:
        q: [B, H, R] absorbed queries.
        latent_pool: [tokens, R].
        token_rows: [B, >= max(lengths)] integer; row b holds the pool rows of sequence b in order. What stands after
            ``lengths[b]`` is never followed.
        lengths: tokens of each sequence, each >= 1.
        kv_lora_rank, scale: as in :func:`mla_prefill`.

    Returns:
        [B, H, C] in q's dtype.

    Raises:
        ValueError: a length is below 1 or beyond ``token_rows``.
    """
    batch, longest = q.shape[0], max(lengths)
    if min(lengths) < 1 or longest > token_rows.shape[1]:
        raise ValueError(f"lengths {list(lengths)}: each must be between 1 and the {token_rows.shape[1]} rows given")
    padding_rows = batch * longest - sum(lengths)
    if (
        batch == 1
        or padding_rows > batch * _PADDING_ROWS_PER_SEQUENCE
        or batch * longest * latent_pool.shape[1] > _PADDED_ELEMENTS
    ):
        out = q.new_empty(batch, q.shape[1], kv_lora_rank)
        for i, length in enumerate(lengths):
            latent = latent_pool.index_select(0, token_rows[i, :length])
            weights = torch.softmax(_scores(q[i], latent.t(), scale), -1, dtype=torch.float32)
            torch.mm(weights.to(q.dtype), latent[:, :kv_lora_rank], out=out[i])
        return out
    return _decode_padded(q, latent_pool, token_rows[:, :longest], lengths, kv_lora_rank, scale)


def _decode_padded(
    q: Tensor, latent_pool: Tensor, token_rows: Tensor, lengths: Sequence[int], kv_lora_rank: int, scale: float
) -> Tensor:
    longest = token_rows.shape[1]
    ragged = min(lengths) != longest
    padding = None
    if ragged:
        ends = torch.tensor(lengths, device=q.device).unsqueeze(1)
        padding = torch.arange(longest, device=q.device) >= ends
        # Padding gathers the first token again: zero weight times an unwritten row could be NaN.
        token_rows = torch.where(padding, token_rows[:, :1], token_rows)
    latent = torch.nn.functional.embedding(token_rows, latent_pool)  # [B, S, R]
    scores = torch.baddbmm(q.new_empty(()), q, latent.transpose(1, 2), beta=0, alpha=scale)
    if padding is not None:
        scores.masked_fill_(padding.unsqueeze(1), float("-inf"))
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights, latent[..., :kv_lora_rank])


def _scores(q: Tensor, keys: Tensor, scale: float) -> Tensor:
    """``scale * q @ keys`` in one operation."""
    return torch.addmm(q.new_empty(()), q, keys, beta=0, alpha=scale)
