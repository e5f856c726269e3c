"""How far loading has come, said every few seconds: a line in the engine's log, an announcement to the launcher."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from k3_sglang.announce import LOADING, announce

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

EVERY_S = 2.0
GB = 1e9


def followed(tensors: Iterable[tuple[str, torch.Tensor]], total: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, counted on their way into the model.

    Args:
        tensors: (name, tensor) pairs.
        total: how many there should be.
    """
    started = told = time.monotonic()
    before_bytes = resident_bytes("VmRSS")
    done, size_bytes = 0, 0
    for name, tensor in tensors:
        yield name, tensor
        done, size_bytes = done + 1, size_bytes + tensor.nbytes
        now = time.monotonic()
        if now - told >= EVERY_S:
            _tell(f"loading weights {described(done, total, size_bytes)}", done, total)
            told = now
    seconds, peak_bytes = time.monotonic() - started, resident_bytes("VmHWM")
    memory = f"process memory {before_bytes / GB:.2f} GB before, {peak_bytes / GB:.2f} GB at most"
    _tell(f"read weights {described(done, total, size_bytes)} in {seconds:.1f} s, {memory}", done, total)


def described(done: int, total: int, size_bytes: int) -> str:
    """``37 % (412/1,103 tensors, 1.2 GB)``."""
    return f"{100 * done // max(1, total)} % ({done:,}/{total:,} tensors, {size_bytes / GB:.1f} GB)"


def resident_bytes(field: str) -> int:
    """This process's memory: ``VmRSS`` now or ``VmHWM`` at most, with the pages of files it maps (``proc(5)``)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"/proc/self/status has no field {field!r}; VmRSS and VmHWM are always there")


def _tell(text: str, done: int, total: int) -> None:
    logger.info(text)
    announce(LOADING, text=text, done=done, total=total)
