"""Routing for training: which experts a token goes to, and its way there and back, sorted by expert.

Axes: N tokens, k experts per token, E experts, L latent width, I expert width; rows R = N * k, sorted by expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Routing(NamedTuple):
    """Who works on what in one layer."""

    weights: Tensor
    """[N, k] share of each chosen expert."""
    token: Tensor
    """[R] token of each sorted row."""
    row: Tensor
    """[N, k] sorted row of each choice."""
    counts: list[int]
    """[E] rows per expert."""


def route(logits: Tensor, bias: Tensor, per_token: int, renormalize: bool, scale: float) -> Routing:
    """Choose experts by sigmoid score plus correction bias; shares come from the scores alone.

    Args:
        logits: [N, E] router projection. bias: [E] correction bias, no gradient.
    """
    scores = torch.sigmoid(logits)
    chosen = torch.topk(scores.detach() + bias, per_token, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    order = torch.argsort(chosen.flatten(), stable=True)
    row = torch.empty_like(order)
    row[order] = torch.arange(order.shape[0], device=order.device)
    counts = torch.bincount(chosen.flatten(), minlength=logits.shape[1])
    return Routing(weights * scale, order // per_token, row.view_as(chosen), counts.tolist())


class _Spread(Function):
    """Copy each token's latent to its k sorted rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, row: Tensor) -> Tensor:
        """x [N, L] -> [R, L]."""
        ctx.save_for_backward(row)
        return x.index_select(0, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Sum over a token's rows."""
        (row,) = ctx.saved_tensors
        return grad.index_select(0, row.flatten()).view(*row.shape, -1).sum(1), None, None


class _Gather(Function):
    """Bring sorted rows back to their tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row: Tensor, order: Tensor) -> Tensor:
        """rows [R, L] -> [N, k, L]."""
        ctx.save_for_backward(order)
        return rows.index_select(0, row.flatten()).view(*row.shape, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The same permutation, backwards."""
        (order,) = ctx.saved_tensors
        return grad.reshape(-1, grad.shape[-1]).index_select(0, order), None, None


def spread(x: Tensor, routing: Routing) -> Tensor:
    """Latents [N, L] -> sorted rows [R, L]."""
    return _Spread.apply(x, routing.token, routing.row)


def combine(rows: Tensor, routing: Routing) -> Tensor:
    """Sorted expert outputs [R, L] -> their weighted sum per token [N, L]."""
    order = torch.empty_like(routing.row.flatten())
    order[routing.row.flatten()] = torch.arange(order.shape[0], device=order.device)
    by_token = _Gather.apply(rows, routing.row, order)
    return torch.bmm(routing.weights.unsqueeze(1), by_token).squeeze(1)
