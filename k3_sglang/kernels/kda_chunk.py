"""Kimi Delta Attention over a whole sequence in matrix form, the fast prefill of :mod:`.kda`.

Axes: T tokens, H heads, K key width, V value width, N chunks, C tokens per chunk, L halvings of a chunk down to 32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

MIN_LOG_DECAY: Final = -5.0
"""Smallest log decay per token for which :func:`kda_chunk` cannot overflow (K3's ``gate_lower_bound``)."""

CHUNK_SIZE: Final = 64
"""Tokens solved together."""

_BASE: Final = 16
"""Block whose decays are split at its middle: exp(5 * 8) squared stays far inside float32."""

_SEGMENT_ELEMENTS: Final = 512 * 4 * 32
"""Tokens x heads x width worked on at a time: keeps the intermediates near the cache."""


def kda_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, chunk_size: int = CHUNK_SIZE
) -> tuple[Tensor, Tensor]:
    """The recurrence over a whole sequence in matrix form: equal to ``kda_recurrent`` up to float32 rounding.

    Inside a chunk the writes u solve a unit lower triangular system (the WY form of a product of Householder-like
    factors); between chunks the state moves by one small matrix product. A decay between two tokens is always formed
    as a product of factors whose exponents are plain sums of few g, never as the ratio of two long products.

    Args:
        q, k: [T, H, K], normalised and scaled; T >= 1. v: [T, H, V]. g: [T, H, K] in [-5, 0]. beta: [T, H].
        state: [H, V, K] before the first token; not modified. All are float32 (float64 in tests).
        chunk_size: a power of two >= 16.

    Returns:
        o [T, H, V] and the state [H, V, K] after the last token, in the inputs' dtype.

    Raises:
        ValueError: ``chunk_size`` is not allowed, or there is no token.
    """
    total, heads, width = q.shape
    if chunk_size < _BASE or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size is {chunk_size}; it must be a power of two of at least {_BASE}")
    if total == 0:
        raise ValueError("kda_chunk got no tokens; call it with at least one")
    segment = max(1, _SEGMENT_ELEMENTS // (heads * width * chunk_size)) * chunk_size
    outputs = []
    for start in range(0, total, segment):
        part = slice(start, min(start + segment, total))
        output, state = _segment(q[part], k[part], v[part], g[part], beta[part], state, chunk_size)
        outputs.append(output)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)), state


def _segment(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """:func:`kda_chunk` over few enough chunks to hold all their intermediates at once."""
    total, heads, width = q.shape
    size = _BASE
    while size < min(total, chunk_size):
        size *= 2
    count = -(-total // size)
    qk = _by_chunk(torch.stack((q, k)), count, size)  # [2, H, N, C, K]
    v, g, beta = _by_chunk(v, count, size), _by_chunk(g, count, size), _by_chunk(beta.unsqueeze(-1), count, size)

    decay = _decays(g)  # [H, N, L + 4, C, K]
    to_start, to_end = decay[:, :, 0], decay[:, :, 1]
    scores = _intra_chunk_scores(qk, decay[:, :, 2:])  # [2, H, N, C, C]
    q_from_start, k_from_start = (qk * to_start).unbind(0)

    # u = U - W S^T with (I + diag(beta) KK) [U | W] = diag(beta) [v | k * decay from the chunk's start]
    solved = torch.linalg.solve_triangular(
        scores[1] * beta, torch.cat((v, k_from_start), -1) * beta, upper=False, unitriangular=True
    )
    moved = solved.transpose(-1, -2) @ (qk[1] * to_end)  # [H, N, V + K, K]
    value_width = v.shape[-1]
    write, erase = moved[..., :value_width, :], moved[..., value_width:, :]
    transition = torch.diag_embed(to_start[..., -1, :]) - erase  # [H, N, K, K]

    states = [state]
    for n in range(count):
        states.append(torch.baddbmm(write[:, n], states[-1], transition[:, n]))
    entering = torch.stack(states[:-1], 1).transpose(-1, -2)  # [H, N, K, V]
    update = solved[..., :value_width] - solved[..., value_width:] @ entering
    output = q_from_start @ entering + scores[0] @ update  # [H, N, C, V]
    return output.flatten(1, 2)[:, :total].transpose(0, 1), states[-1]


def _by_chunk(x: Tensor, count: int, size: int) -> Tensor:
    """[..., T, H, D] -> contiguous [..., H, N, C, D]; the tail is padded with zeros, which change no state."""
    padding = count * size - x.shape[-3]
    if padding:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding))
    return x.transpose(-3, -2).unflatten(-2, (count, size)).contiguous()


@lru_cache(maxsize=16)
def _sum_matrix(size: int, device: torch.device) -> Tensor:
    """0/1/-1 matrix [(L + 4) * C, C] that turns g of a chunk into every exponent :func:`_intra_chunk_scores` needs.

    Row blocks: sum from the chunk's start; sum to its end; for each halving of the chunk down to 32 tokens, the sum
    between a token and the middle of its block; for blocks of 16, the signed sum from the middle, and its negative.
    """
    with torch.inference_mode(False):
        token = torch.arange(size, device=device)
        blocks = [token[None] <= token[:, None], token[None] > token[:, None]]
        sums = [block.float() for block in blocks]
        block_size = size
        while block_size >= _BASE:
            middle = token // block_size * block_size + block_size // 2
            after = (token[None] >= middle[:, None]) & (token[None] <= token[:, None])
            before = (token[None] > token[:, None]) & (token[None] < middle[:, None])
            if block_size > _BASE:
                sums.append((after | before).float())
            else:
                signed = after.float() - before.float()
                sums += [signed, -signed]
            block_size //= 2
        return torch.cat(sums)


def _decays(g: Tensor) -> Tensor:
    """All decay factors of every chunk, [H, N, C, K] -> [H, N, L + 4, C, K]; see :func:`_sum_matrix`."""
    size, width = g.shape[-2:]
    exponents = _sum_matrix(size, g.device).to(g.dtype) @ g
    return exponents.exp().unflatten(-2, (-1, size))


def _intra_chunk_scores(qk: Tensor, decay: Tensor) -> Tensor:
    """sum_k (q or k)_t * k_s * exp(g_{s+1} + ... + g_t) for s <= t of one chunk, zero above the diagonal.

    The lower triangle is cut into square blocks below the diagonal (late half x early half, recursively), where both
    factors are decays towards the boundary between the halves, and 16 x 16 blocks on the diagonal.

    Args:
        qk: [2, H, N, C, K]. decay: [H, N, L + 2, C, K], the row blocks of :func:`_sum_matrix` from the third on.

    Returns:
        [2, H, N, C, C]: q with k, and k with k.
    """
    size = qk.shape[-2]
    scores = qk.new_zeros(*qk.shape[:-1], size)
    block_size, level = size, 0
    while block_size > _BASE:
        half = block_size // 2
        toward_middle = (qk * decay[:, :, level]).unflatten(-2, (-1, 2, half))
        block = toward_middle[..., 1, :, :] @ toward_middle[1, ..., 0, :, :].transpose(-1, -2)
        _diagonal_blocks(scores, block_size)[..., half:, :half] = block
        block_size, level = half, level + 1
    late = (qk * decay[:, :, level]).unflatten(-2, (-1, _BASE))
    early = (qk[1] * decay[:, :, level + 1]).unflatten(-2, (-1, _BASE))
    _diagonal_blocks(scores, _BASE)[:] = (late @ early.transpose(-1, -2)).tril()
    return scores


def _diagonal_blocks(scores: Tensor, block_size: int) -> Tensor:
    """View [..., C, C] as its blocks on the diagonal, [..., C / b, b, b]."""
    count = scores.shape[-1] // block_size
    tiled = scores.unflatten(-1, (count, block_size)).unflatten(-3, (count, block_size))
    return tiled.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
