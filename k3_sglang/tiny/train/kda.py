"""Kimi Delta Attention for training: whole batches, matrix form in chunks, differentiable.

Axes: B sequences, T tokens, H heads, K = V head width, N chunks, C tokens per chunk. Equations in
:mod:`k3_sglang.kernels.kda`. Inside a chunk every decay is written relative to the chunk's middle,
``a_t = exp(g_(mid+1) + ... + g_t)``, so the decay from s to t is ``a_t / a_s``. With g >= -5 and at most
32 tokens, a and 1/a stay below exp(80): float32 holds them; what overflows lies above the diagonal, which is cut off.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from k3_sglang.config import KDA_L2NORM_EPS
from k3_sglang.tiny.train.fusion import fused

MAX_CHUNK: Final = 32
"""Longest chunk for which no factor leaves float32 (see the module text)."""


class Chunks(NamedTuple):
    """What the chunks need of their tokens, each [B, H, N, C, K]; ``mid``: relative to the chunk's middle."""

    q_mid: Tensor
    k_mid: Tensor
    k_inverse: Tensor
    """k / a: meets q_mid and k_mid in products over earlier tokens."""
    q_start: Tensor
    k_start: Tensor
    """q and k decayed from the chunk's start."""
    k_end: Tensor
    """k decayed to the chunk's end."""
    decay: Tensor
    """[B, H, N, 1, K]: decay over the whole chunk."""


@lru_cache(maxsize=8)
def _sums(size: int, device: torch.device) -> Tensor:
    """[C + 2, C]: the signed sum from the middle to each token, the sum of the first half, the sum of the second."""
    token = torch.arange(size, device=device)
    middle = size // 2
    until = (token[None] <= token[:, None]).float()
    first, second = (token < middle).float(), (token >= middle).float()
    return torch.cat((until - first, first[None], second[None]))


@fused
def _weighted_taps(padded: Tensor, taps: Tensor) -> Tensor:
    """``y_t = sum_i taps_i * padded_(t + i)``: [B, T + 3, D], [D, 4] -> [B, T, D]."""
    length = padded.shape[1] - taps.shape[1] + 1
    mixed = padded[:, :length] * taps[:, 0]
    for i in range(1, taps.shape[1]):
        mixed = mixed + padded[:, i : i + length] * taps[:, i]
    return mixed


class _ShortConvolution(Function):
    """Causal convolution of each channel by itself; compiled autograd is ten times slower at the taps' gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        """x [B, T, D], taps [D, 4], the last one for the current token -> [B, T, D]."""
        padded = F.pad(x, (0, 0, taps.shape[1] - 1, 0))
        ctx.save_for_backward(padded, taps)
        return _weighted_taps(padded, taps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x and taps."""
        padded, taps = ctx.saved_tensors
        count, length = taps.shape[1], grad.shape[1]
        taps_grad = [(grad * padded[:, i : i + length]).sum((0, 1)) for i in range(count)]
        later = F.pad(grad, (0, 0, 0, count - 1))
        return _weighted_taps(later, taps.flip(1)), torch.stack(taps_grad, 1)


@fused
def _activate(mixed: Tensor, heads: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """SiLU and normalisation: [B, T, 3 H K] -> q, k, v, each [B, T, H, K]; q scaled."""
    active = mixed * torch.sigmoid(mixed)
    q, k, v = active.unflatten(-1, (3, heads, -1)).unbind(2)
    q = q * (torch.rsqrt(q.square().sum(-1, keepdim=True) + eps) * q.shape[-1] ** -0.5)
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + eps)
    return q, k, v


@fused
def _log_decay(z: Tensor, rate: Tensor, bias: Tensor, bound: float) -> Tensor:
    """[B, T, H K] -> g [B, T, H, K] in (bound, 0). rate [H], bias [H, K]."""
    return bound * torch.sigmoid(rate.unsqueeze(-1) * (z.unflatten(-1, (bias.shape[0], -1)) + bias))


class _ByChunk(Function):
    """[B, T, H, K] -> contiguous [B, H, N, C, K], and back for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunk: int) -> Tensor:
        """T must be a multiple of ``chunk``."""
        return x.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """[B, H, N, C, K] -> contiguous [B, T, H, K]."""
        return grad.permute(0, 2, 3, 1, 4).contiguous().flatten(1, 2), None


@fused
def _decayed(q: Tensor, k: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Fields of :class:`Chunks` from q, k [B, H, N, C, K] and the sums [B, H, N, C + 2, K] of :func:`_sums`."""
    size = q.shape[-2]
    a = torch.exp(exponents[..., :size, :])
    inverse = torch.exp(-exponents[..., :size, :])
    first, second = torch.exp(exponents[..., size : size + 1, :]), torch.exp(exponents[..., size + 1 :, :])
    q_mid, k_mid, k_inverse = q * a, k * a, k * inverse
    return q_mid, k_mid, k_inverse, q_mid * first, k_mid * first, k_inverse * second, first * second


class _Scan(Function):
    """States entering each chunk: ``S_(n+1) = S_n @ transition_n + write_n``, S_0 = 0."""

    @staticmethod
    def forward(ctx: Any, transition: Tensor, write: Tensor) -> Tensor:
        """transition, write [B H, N, K, K] (rows of S are V) -> entering states [B H, N, V, K]."""
        states = torch.empty_like(write)
        states[:, 0] = 0
        for n in range(write.shape[1] - 1):
            torch.baddbmm(write[:, n], states[:, n], transition[:, n], out=states[:, n + 1])
        ctx.save_for_backward(transition, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of transition and write."""
        transition, states = ctx.saved_tensors
        back = transition.transpose(-1, -2)
        later = torch.empty_like(grad)  # gradient of S_(n+1), which is that of write_n
        later[:, -1] = 0
        for n in range(grad.shape[1] - 1, 0, -1):
            torch.baddbmm(grad[:, n], later[:, n], back[:, n], out=later[:, n - 1])
        flat = states.flatten(0, 1).transpose(-1, -2) @ later.flatten(0, 1)
        return flat.view_as(transition), later


def kda(qkv: Tensor, z: Tensor, beta: Tensor, taps: Tensor, rate: Tensor, bias: Tensor, bound: float) -> Tensor:
    """KDA of whole sequences from their first token, without the output gate.

    Args:
        qkv: [B, T, 3 H K] before the short convolution, q | k | v.
        z: [B, T, H K], decay projection.
        beta: [B, T, H] in (0, 1).
        taps: [3 H K, 4]. rate: [H], exp(A_log). bias: [H, K]. bound: ``gate_lower_bound``.

    Returns:
        [B, T, H, V].
    """
    batch, total, heads = beta.shape
    chunk = MAX_CHUNK
    padding = -total % chunk
    if padding:
        qkv, z, beta = (F.pad(x, (0, 0, 0, padding)) for x in (qkv, z, beta))
    length = total + padding
    mixed = _ShortConvolution.apply(qkv, taps)
    natural = (*_activate(mixed, heads, KDA_L2NORM_EPS), _log_decay(z, rate, bias, bound))
    q, k, v, g = (_ByChunk.apply(x, chunk) for x in natural)
    strength = beta.view(batch, -1, chunk, heads).permute(0, 3, 1, 2).unsqueeze(-1)  # [B, H, N, C, 1]
    output = _chunked(Chunks(*_decayed(q, k, _sums(chunk, g.device).to(g.dtype) @ g)), v, strength)
    return output.permute(0, 2, 3, 1, 4).reshape(batch, length, heads, -1)[:, :total]


def _chunked(c: Chunks, v: Tensor, strength: Tensor) -> Tensor:
    """[B, H, N, C, V] from the chunks' factors; see :func:`k3_sglang.kernels.kda_chunk.kda_chunk`."""
    shape = v.shape
    batch, heads, count, size, width = shape
    earlier = c.k_inverse.transpose(-1, -2)
    scores = (c.q_mid @ earlier).tril()
    system = (c.k_mid @ earlier).tril(-1) * strength
    solved = torch.linalg.solve_triangular(
        system, torch.cat((v, c.k_start), -1) * strength, upper=False, unitriangular=True
    )
    moved = solved.transpose(-1, -2) @ c.k_end  # [B, H, N, V + K, K]
    transition = torch.diag_embed(c.decay.squeeze(-2)) - moved[..., width:, :]
    entering = _Scan.apply(transition.flatten(0, 1), moved[..., :width, :].flatten(0, 1))
    state = entering.view(batch, heads, count, width, -1).transpose(-1, -2)
    update = solved[..., :width] - solved[..., width:] @ state
    return c.q_start @ state + scores @ update
