"""Kimi Delta Attention in plain PyTorch: gate, normalisation, step-by-step recurrence, batched decode.

Per head, with state ``S`` [V, K] (value axis first, as the engine's pool stores it), per token:

    S <- S * exp(g)                  decay of the key axis, g [K] in log space, -5 <= g <= 0
    u  = beta * (v - S k)            what the delta rule writes
    S <- S + u k^T
    o  = S q

q and k come normalised (:func:`normalise_qk`); everything here is float32. Kimi Linear, arXiv 2510.26692; the
bounded gate is K3's, arXiv 2607.24653 eq. 2.

Axes: T tokens, B sequences, H heads, K key width, V value width. The chunkwise form is in :mod:`.kda_chunk`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from k3_sglang.config import KDA_L2NORM_EPS
from k3_sglang.kernels.kda_chunk import MIN_LOG_DECAY, kda_chunk

__all__ = [
    "MIN_LOG_DECAY",
    "fold_gate",
    "folded_gate",
    "gate",
    "kda_chunk",
    "kda_decode",
    "kda_recurrent",
    "l2norm",
    "normalise_qk",
]


def gate(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Log decay ``lower_bound * sigmoid(exp(A_log) * (z + dt_bias))``.

    Args:
        z: gate projection ``f_b(f_a(x))``, [..., H * K], any float dtype.
        a_log: [H] float32 (the checkpoint pads it; pass the first H values).
        dt_bias: [H * K] float32.
        lower_bound: ``gate_lower_bound`` of the config, -5 in the release.

    Returns:
        g [..., H, K] float32 in (lower_bound, 0).

    Raises:
        ValueError: ``lower_bound`` is outside [-5, 0).
    """
    _check_lower_bound(lower_bound)
    heads = a_log.shape[0]
    shifted = z.float().add(dt_bias).unflatten(-1, (heads, -1))
    return torch.sigmoid(shifted * a_log.exp().unsqueeze(-1)) * lower_bound


def fold_gate(a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> tuple[Tensor, Tensor]:
    """Constants (rate, shift), both [H * K], that let :func:`folded_gate` compute :func:`gate` in three operations.

    Raises:
        ValueError: ``lower_bound`` is outside [-5, 0).
    """
    _check_lower_bound(lower_bound)
    rate = a_log.exp().repeat_interleave(dt_bias.shape[0] // a_log.shape[0])
    return rate, rate * dt_bias


def folded_gate(z: Tensor, rate: Tensor, shift: Tensor, lower_bound: float, num_heads: int) -> Tensor:
    """:func:`gate` with the constants of :func:`fold_gate`; differs from it by float32 rounding only.

    Returns:
        g [..., H, K] float32.
    """
    return torch.addcmul(shift, z.float(), rate).sigmoid_().mul_(lower_bound).unflatten(-1, (num_heads, -1))


def _check_lower_bound(lower_bound: float) -> None:
    if not MIN_LOG_DECAY <= lower_bound < 0:
        raise ValueError(
            f"gate_lower_bound is {lower_bound}; the chunkwise KDA stays inside float32 for [{MIN_LOG_DECAY}, 0) only"
        )


def l2norm(x: Tensor, eps: float = KDA_L2NORM_EPS) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


@lru_cache(maxsize=16)
def _qk_factors(head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Factors [2, 1, 1] for the sums of squares of q and k, and the same times eps."""
    with torch.inference_mode(False):
        factors = torch.tensor([float(head_dim), 1.0], device=device).view(2, 1, 1)
        return factors, factors * KDA_L2NORM_EPS


def normalise_qk(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split the short convolution's output and normalise q and k; q also gets the ``K ** -0.5`` scale.

    Args:
        qkv: [T, 3 * H * K], q | k | v, after SiLU.

    Returns:
        q, k, v, each [T, H, K] float32.
    """
    split = qkv.float().view(qkv.shape[0], 3, num_heads, -1)
    qk, v = split[:, :2], split[:, 2]
    factors, shifts = _qk_factors(split.shape[-1], qkv.device)
    # K * (sum + eps) under q's root is q's scale; one operation less than scaling afterwards.
    qk = qk * torch.addcmul(shifts, qk.square().sum(-1, keepdim=True), factors).rsqrt()
    return qk[:, 0], qk[:, 1], v


def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, one token at a time: the definition the other forms are tested against.

    Args:
        q, k: [T, H, K], normalised and scaled.
        v: [T, H, V].
        g: [T, H, K] log decay.
        beta: [T, H] in (0, 1).
        state: [H, V, K] before the first token; not modified.

    Returns:
        o [T, H, V] and the state [H, V, K] after the last token, in the inputs' dtype (float32, or float64 in tests).
    """
    outputs = []
    for t in range(q.shape[0]):
        state = state * g[t].exp().unsqueeze(-2)
        predicted = (state * k[t].unsqueeze(-2)).sum(-1)
        update = beta[t].unsqueeze(-1) * (v[t] - predicted)
        state = state + update.unsqueeze(-1) * k[t].unsqueeze(-2)
        outputs.append((state * q[t].unsqueeze(-2)).sum(-1))
    return (torch.stack(outputs) if outputs else torch.empty_like(v)), state


def kda_decode(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state_pool: Tensor, slots: Tensor) -> Tensor:
    """One token for each of B sequences whose states live in a pool.

    Args:
        q, k: [B, H, K], normalised and scaled. v: [B, H, V]. g: [B, H, K]. beta: [B, H]. All float32.
        state_pool: [slots, H, V, K]; rows ``slots`` are replaced, no other row is touched.
        slots: [B] int64, all different.

    Returns:
        o [B, H, V] float32.
    """
    batch, heads, width = k.shape
    state = state_pool.index_select(0, slots).float()
    state *= g.exp().unsqueeze(-2)
    flat = state.view(batch * heads, -1, width)
    # Row vectors times a transposed state: several times faster on CPUs than the same product as columns.
    transposed = flat.transpose(1, 2)
    key = k.reshape(batch * heads, 1, width)
    update = torch.baddbmm(v.reshape(batch * heads, 1, -1), key, transposed, alpha=-1)
    update *= beta.reshape(batch * heads, 1, 1)
    flat.baddbmm_(update.transpose(1, 2), key)
    output = torch.bmm(q.reshape(batch * heads, 1, width), transposed)
    state_pool.index_copy_(0, slots, state.to(state_pool.dtype))
    return output.view(batch, heads, -1)
