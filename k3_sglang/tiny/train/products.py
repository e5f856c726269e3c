"""Matrix products of the trainer: float32, or with both factors rounded to bfloat16 where the CPU is fast at that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class _LinearBf16(Function):
    """``x @ weight.T`` of rounded factors; all three products of the step are in bfloat16, results float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, in], weight [out, in] -> [N, out]."""
        low, matrix = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(low, matrix)
        return torch.mm(low, matrix.t()).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x and weight."""
        low, matrix = ctx.saved_tensors
        upper = grad.bfloat16()
        return torch.mm(upper, matrix).float(), torch.mm(upper.t(), low).float()


class Products:
    """The linear layers of one model."""

    def __init__(self, bf16: bool) -> None:
        self.bf16 = bf16

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., in], weight [out, in] -> [..., out], float32."""
        if not self.bf16:
            return F.linear(x, weight)
        flat: Any = _LinearBf16.apply(x.flatten(0, -2), weight)
        return flat.view(*x.shape[:-1], -1)

    def grouped(self, rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        """rows [R, in] sorted by expert, weight [E, out, in] -> [R, out], float32."""
        result: Any = _GroupedLinear.apply(rows, weight, counts, torch.bfloat16 if self.bf16 else rows.dtype)
        return result


class _GroupedLinear(Function):
    """Rows sorted by expert times each expert's matrix."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: list[int], dtype: torch.dtype) -> Tensor:
        """rows [R, in], weight [E, out, in] -> [R, out]."""
        low, matrices = rows.to(dtype), weight.to(dtype)
        output = low.new_empty(rows.shape[0], weight.shape[1])
        for part, out, matrix in zip(low.split(counts), output.split(counts), matrices, strict=True):
            torch.mm(part, matrix.t(), out=out)
        ctx.save_for_backward(low, matrices)
        ctx.counts = counts
        return output.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients of rows and weight."""
        low, matrices = ctx.saved_tensors
        upper = grad.to(low.dtype).contiguous()
        row_grad, weight_grad = torch.empty_like(low), torch.empty_like(matrices)
        parts = zip(low.split(ctx.counts), upper.split(ctx.counts), row_grad.split(ctx.counts), strict=True)
        for expert, (part, above, out) in enumerate(parts):
            torch.mm(above, matrices[expert], out=out)
            torch.mm(above.t(), part, out=weight_grad[expert])
        return row_grad.to(grad.dtype), weight_grad.to(grad.dtype), None, None
