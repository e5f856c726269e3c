"""How a layer is split over tensor-parallel ranks: who holds which rows, and the sum that joins partial results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class Ranks:
    """One rank's place in the tensor-parallel group, and the group's all-reduce (identity for a group of one)."""

    rank: int = 0
    size: int = 1
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = _identity

    def share(self, total: int, what: str) -> int:
        """This rank's part of ``total`` equal units.

        Raises:
            ValueError: ``total`` does not divide by the group size.
        """
        if total % self.size:
            raise ValueError(
                f"{what} = {total} cannot be split over {self.size} tensor-parallel ranks; "
                f"choose a tensor-parallel size that divides {total}"
            )
        return total // self.size

    def rows(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's equal part of a whole tensor along ``dim`` (a view)."""
        part = self.share(tensor.shape[dim], f"dimension {dim} of a {tuple(tensor.shape)} tensor")
        return tensor.narrow(dim, self.rank * part, part)


def weight(*shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
    """An inference parameter whose memory is not yet written; loading fills every one of them."""
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
