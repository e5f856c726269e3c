"""Checkpoints in fewer bytes: states of running requests stay float32, kept ones are stored as bfloat16 or int8.

A checkpoint is written once and read once per hit, so the error of storing enters the recurrence once per turn of a
session, and what it does to the state decays with it. The short convolution's window is small and stored as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

LARGEST = 127
"""int8 is used symmetrically."""

FORMATS = ("bfloat16", "int8")
"""Names of the formats besides the state's own."""


class Store(Protocol):
    """Recurrent states of some slots; all layers of a state together."""

    def write(self, slots: Tensor, states: Tensor) -> None:
        """Keep ``states`` [layers, n, heads, value, key] in ``slots`` [n]."""
        ...

    def read(self, slots: Tensor) -> Tensor:
        """What is kept in ``slots`` [n], as float32 [layers, n, heads, value, key]."""
        ...

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one state."""
        ...


def quantize(states: Tensor) -> tuple[Tensor, Tensor]:
    """Round to int8 with one scale per row of values.

    A row [key] of the state makes one number of the layer's output, so an error stays within that number, and a row
    whose entries are small keeps its relative accuracy.

    Args:
        states: [..., value, key], any floating type.

    Returns:
        int8 of the same shape, and float32 scales [..., value, 1]. A row of zeros has scale 0.

    Raises:
        ValueError: an entry is not finite.
    """
    exact = states.float()
    scale = exact.abs().amax(dim=-1, keepdim=True) / LARGEST
    if not bool(torch.isfinite(scale).all()):
        raise ValueError("a state holds an entry that is not finite; it cannot be stored as int8")
    steps = exact / torch.where(scale > 0, scale, 1.0)
    return steps.round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scale


def dequantize(quantized: Tensor, scale: Tensor) -> Tensor:
    """float32 states of :func:`quantize`'s result."""
    return quantized.float() * scale


class BFloat16Store:
    """Half of the bytes, eight bits of mantissa."""

    def __init__(self, layers: int, slots: int, shape: Sequence[int], device: torch.device) -> None:
        self._states = torch.zeros(layers, slots, *shape, dtype=torch.bfloat16, device=device)

    def write(self, slots: Tensor, states: Tensor) -> None:
        """See :class:`Store`."""
        self._states[:, slots] = states.to(torch.bfloat16)

    def read(self, slots: Tensor) -> Tensor:
        """See :class:`Store`."""
        return self._states[:, slots].float()

    @property
    def bytes_per_slot(self) -> int:
        """See :class:`Store`."""
        return self._states[:, 0].nbytes


class Int8Store:
    """A quarter of the bytes, and a scale per row."""

    def __init__(self, layers: int, slots: int, shape: Sequence[int], device: torch.device) -> None:
        heads, value, key = shape
        self._quantized = torch.zeros(layers, slots, heads, value, key, dtype=torch.int8, device=device)
        self._scale = torch.zeros(layers, slots, heads, value, 1, device=device)

    def write(self, slots: Tensor, states: Tensor) -> None:
        """See :class:`Store`.

        Raises:
            ValueError: an entry is not finite.
        """
        self._quantized[:, slots], self._scale[:, slots] = quantize(states)

    def read(self, slots: Tensor) -> Tensor:
        """See :class:`Store`."""
        return dequantize(self._quantized[:, slots], self._scale[:, slots])

    @property
    def bytes_per_slot(self) -> int:
        """See :class:`Store`."""
        return self._quantized[:, 0].nbytes + self._scale[:, 0].nbytes
