"""Make host memory behave on a machine without a driver: pinned memory is ordinary memory there."""

from __future__ import annotations

from typing import Any

import torch


def keep_host_memory_pageable() -> None:
    """Make ``Tensor.pin_memory`` return the tensor itself when no accelerator exists.

    SGLang's decode bookkeeping pins a mask unconditionally (``managers/schedule_batch.py``), which raises without a
    driver. Pinning only speeds up copies to a device, so without one the tensor as it is serves.
    """
    if torch.accelerator.is_available():
        return

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        return self

    torch.Tensor.pin_memory = pin_memory
