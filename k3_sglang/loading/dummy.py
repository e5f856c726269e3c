"""Packed experts for ``--load-format dummy``: SGLang fills floating-point parameters only, bytes stay as they were."""

from __future__ import annotations

from typing import Any

import torch

SEED = 1234
SCALE_BYTE = 115
"""2^(115 - 127): values up to 6 / 4096, about as large as SGLang's dummy floats."""


def fill_packed(result: None, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """After SGLang's ``initialize_dummy_weights``: codes and scales of small numbers, the same every time."""
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.uint8:
            continue
        if name.endswith("scales"):
            parameter.fill_(SCALE_BYTE)
        else:
            generator = torch.Generator(device=parameter.device).manual_seed(SEED)
            parameter.random_(0, 256, generator=generator)
