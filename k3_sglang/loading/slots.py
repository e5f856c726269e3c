"""Slots: where each checkpoint tensor goes, what shape it must have, and whether it has arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError

from k3_sglang.loading.inventory import BYTE_DTYPES, FLOAT_DTYPES


class CheckpointError(ValueError):
    """A checkpoint whose tensors are not exactly the ones the model needs; the message lists names and shapes."""


@dataclass(frozen=True)
class Slot:
    """The one destination of one checkpoint tensor."""

    shape: tuple[int, ...]
    """Shape the tensor must have in the file."""
    dtypes: tuple[torch.dtype, ...]
    """Allowed dtypes in the file."""
    write: Callable[[torch.Tensor], None]
    """Copies this rank's part of the tensor into its parameter."""


DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "U8": torch.uint8}
"""Safetensors' names of the dtypes a checkpoint may hold."""

FLOATS = tuple(DTYPES[name] for name in FLOAT_DTYPES)
"""Dtypes accepted for unquantized tensors; they are cast to the parameter's dtype."""

BYTES = tuple(DTYPES[name] for name in BYTE_DTYPES)
"""Dtype of packed MXFP4 weights and of their scales."""


def load_all(slots: Mapping[str, Slot], tensors: Iterable[tuple[str, torch.Tensor]], source: str) -> int:
    """Fill every slot from a stream of tensors; each slot once, each tensor consumed.

    Args:
        slots: tensor name to slot.
        tensors: (name, tensor) pairs in any order, as the shards are read.
        source: what is being read, for error messages.

    Returns:
        Number of tensors consumed.

    Raises:
        CheckpointError: a tensor is missing, unknown, given twice, damaged, or has the wrong shape or dtype.
    """
    filled: set[str] = set()
    for name, tensor in _readable(tensors, source):
        slot = slots.get(name)
        if slot is None:
            raise CheckpointError(f"{source}: tensor {name!r} {tuple(tensor.shape)} has no place in this model")
        if name in filled:
            raise CheckpointError(f"{source}: tensor {name!r} appears twice")
        _check(name, tensor, slot, source)
        try:
            slot.write(tensor)
        except ValueError as error:
            raise CheckpointError(f"{source}: tensor {name!r}: {error}") from error
        filled.add(name)
    missing = [name for name in slots if name not in filled]
    if missing:
        shown = ", ".join(f"{name} {slots[name].shape}" for name in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(f"{source}: {len(missing)} of {len(slots)} tensors are missing: {shown}{more}")
    return len(filled)


def _readable(tensors: Iterable[tuple[str, torch.Tensor]], source: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs, with a file that cannot be read as an error of ours; the last tensor read tells where it was."""
    last = "none was read"
    try:
        for name, tensor in tensors:
            last = f"the last tensor read was {name!r}"
            yield name, tensor
    except SafetensorError as error:
        raise CheckpointError(f"{source}: a shard cannot be read, {last}: {error}; copy the files again") from error


def _check(name: str, tensor: torch.Tensor, slot: Slot, source: str) -> None:
    if tuple(tensor.shape) != slot.shape:
        raise CheckpointError(
            f"{source}: tensor {name!r} has shape {tuple(tensor.shape)}; config.json requires {slot.shape}"
        )
    if tensor.dtype not in slot.dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in slot.dtypes)
        raise CheckpointError(f"{source}: tensor {name!r} has dtype {tensor.dtype}; allowed: {allowed}")


class Pair:
    """Two checkpoint tensors that make one parameter together, in whichever order they arrive."""

    def __init__(self, join: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self._join = join
        self._held: dict[int, torch.Tensor] = {}

    def part(self, index: int) -> Callable[[torch.Tensor], None]:
        """Writer for the first (0) or second (1) tensor; joins and lets go of both when the other is there."""

        def write(tensor: torch.Tensor) -> None:
            self._held[index] = tensor
            if len(self._held) == 2:
                self._join(self._held[0], self._held[1])
                self._held.clear()

        return write
