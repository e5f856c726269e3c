"""Checkpoints in fewer bytes: states of running requests stay float32, kept ones are stored as bfloat16 or int8.

A checkpoint is written once and read once per hit, so the error of storing enters the recurrence once per turn of a
session, and what it does to the state decays with it. The short convolution's window is small and stored as it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

STORED_ENV = "K3_SGLANG_CHECKPOINTS"
"""``format:slots``, as ``int8:96``: checkpoints are stored so, in so many slots. Set by the launcher."""

LARGEST = 127
"""int8 is used symmetrically."""


class StateTensors(Protocol):
    """Tensors of SGLang's pool of running states."""

    temporal: Tensor
    """[layers, slots, heads, value, key]."""
    conv: Sequence[Tensor]
    """[layers, slots, ...] each: windows of short convolutions."""


class StatePool(Protocol):
    """SGLang's pool of running states."""

    mamba_cache: StateTensors


class SlotAllocator(Protocol):
    """SGLang's list of free slots."""

    def alloc(self, need_size: int, /) -> Tensor | None:
        """Free slots, None when there are fewer."""
        ...

    def free(self, free_index: Tensor, /) -> None:
        """Give slots back."""
        ...

    def available_size(self) -> int:
        """Free slots."""
        ...

    def clear(self) -> None:
        """Give all slots back."""
        ...


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


STORES: dict[str, type[BFloat16Store] | type[Int8Store]] = {"bfloat16": BFloat16Store, "int8": Int8Store}
"""By the name of the format."""


class CheckpointPool:
    """Slots of kept states beside the pool of running ones, as SGLang's components expect of such a pool.

    Slot 0 is never handed out.
    """

    def __init__(self, form: str, slots: int, running: StatePool, allocator: SlotAllocator) -> None:
        """``running``: SGLang's pool of states; ``allocator``: its slot allocator, of ``slots`` slots."""
        states, conv = running.mamba_cache.temporal, running.mamba_cache.conv
        self.num_slots, self.allocator = slots, allocator
        self.store: Store = STORES[form](states.shape[0], slots + 1, states.shape[2:], states.device)
        self.conv = [window.new_zeros(window.shape[0], slots + 1, *window.shape[2:]) for window in conv]

    def alloc(self, count: int = 1) -> Tensor | None:
        """Free slots [count], None when there are fewer."""
        return self.allocator.alloc(count)

    def free(self, slots: Tensor) -> None:
        """Give slots back."""
        self.allocator.free(slots)

    def available_size(self) -> int:
        """Free slots."""
        return self.allocator.available_size()

    def clear(self) -> None:
        """Give all slots back."""
        self.allocator.clear()

    def store_from_active(self, running: StatePool, own_slots: Tensor, kept_slots: Tensor) -> None:
        """Keep the states of running requests.

        Raises:
            ValueError: an entry is not finite and the format cannot say so.
        """
        self.store.write(kept_slots, running.mamba_cache.temporal[:, own_slots])
        for kept, window in zip(self.conv, running.mamba_cache.conv, strict=True):
            kept[:, kept_slots] = window[:, own_slots]

    def load_to_active(self, running: StatePool, kept_slots: Tensor, own_slots: Tensor) -> None:
        """Give running requests copies of kept states."""
        states = running.mamba_cache.temporal
        states[:, own_slots] = self.store.read(kept_slots).to(states.dtype)
        for kept, window in zip(self.conv, running.mamba_cache.conv, strict=True):
            window[:, own_slots] = kept[:, kept_slots]

    def kept(self, slot: int) -> list[Tensor]:
        """What a slot holds: the convolutions' windows, and the state as it would be restored."""
        state = self.store.read(torch.tensor([slot], device=self.conv[0].device))
        return [*(window[:, slot] for window in self.conv), state]

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one kept state."""
        return self.store.bytes_per_slot + sum(window[:, 0].nbytes for window in self.conv)


@dataclass(frozen=True)
class StoredSettings:
    """How checkpoints are stored when not as the running states are."""

    form: str
    slots: int


def stored_settings() -> StoredSettings | None:
    """What the environment asks for, None when checkpoints are plain slots of the state pool.

    Raises:
        ValueError: the variable names no format or no number of slots.
    """
    given = os.environ.get(STORED_ENV)
    if given is None:
        return None
    form, _, slots = given.partition(":")
    if form not in STORES or not slots.isdecimal() or int(slots) < 1:
        raise ValueError(f"{STORED_ENV} is {given!r}; it must be {' or '.join(STORES)}, a colon and a number of slots")
    return StoredSettings(form, int(slots))


def refuse(context: Any) -> None:
    """Refuse what cannot read a second pool.

    Raises:
        ValueError: naming the flag and the remedy.
    """
    flags = {
        "--enable-hierarchical-cache": context.enable_hierarchical_cache,
        "--enable-unified-memory": context.server_args.enable_unified_memory,
        "--enable-int8-mamba-checkpoint": context.server_args.enable_int8_mamba_checkpoint,
    }
    for flag, given in flags.items():
        if given:
            raise ValueError(
                f"{flag} is set and checkpoints are stored in a format of their own; SGLang's code behind that flag "
                f"takes a checkpoint for a slot of the running states: leave out one of the two"
            )
