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
    expert_parallel_size: int = 1
    """Groups over which whole experts are dealt out; the ranks inside a group split an expert's width."""

    @property
    def within_expert(self) -> Ranks:
        """This rank's place among those that share its experts."""
        size = self._expert_group_size()
        return Ranks(self.rank % size, size)

    def experts(self, total: int) -> range:
        """Indices of the experts this rank holds.

        Raises:
            ValueError: the experts cannot be dealt out evenly.
        """
        if total % self.expert_parallel_size:
            raise ValueError(
                f"{total} experts cannot be dealt out over {self.expert_parallel_size} expert-parallel groups; "
                f"choose an expert-parallel size that divides {total}"
            )
        held = total // self.expert_parallel_size
        first = self.rank // self._expert_group_size() * held
        return range(first, first + held)

    def _expert_group_size(self) -> int:
        if self.size % self.expert_parallel_size:
            raise ValueError(
                f"{self.size} tensor-parallel ranks cannot form {self.expert_parallel_size} expert-parallel groups; "
                f"choose an expert-parallel size that divides {self.size}"
            )
        return self.size // self.expert_parallel_size

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


@dataclass(frozen=True)
class Stage:
    """The layers one pipeline stage holds; a model that is not split is one stage, the first and the last."""

    layers: range
    total: int
    """Layers of all stages together."""

    @property
    def first(self) -> bool:
        """Whether it holds the embedding."""
        return self.layers.start == 0

    @property
    def last(self) -> bool:
        """Whether it holds the final mixture, norm and output head."""
        return self.layers.stop == self.total


def weight(*shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
    """An inference parameter whose memory is not yet written; loading fills every one of them."""
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
