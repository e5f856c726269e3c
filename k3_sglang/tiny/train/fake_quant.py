"""Round routed experts to MXFP4 during training, with the gradient passed straight through."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from k3_sglang.kernels.mxfp4 import GROUP_SIZE, MAGNITUDES

_MAX_EXPONENT = 2
"""Exponent of the largest magnitude, 6 = 1.5 * 2^2."""


def round_mxfp4(values: Tensor) -> Tensor:
    """The values that packing with :func:`k3_sglang.kernels.mxfp4.encode` and unpacking would give.

    Args:
        values: [..., in] float32 with ``in`` divisible by 32; magnitudes of a group far from float32's limits.
    """
    groups = values.unflatten(-1, (-1, GROUP_SIZE))
    _, exponent = torch.frexp(groups.abs().amax(-1, keepdim=True))
    scale = torch.ldexp(torch.ones(exponent.shape, device=values.device), exponent - 1 - _MAX_EXPONENT)
    scaled = groups / scale
    size = scaled.abs()
    step = 0.5 + 0.5 * (size >= 2) + (size >= 4)  # spacing of the magnitudes around a value
    rounded = (torch.round(scaled / step) * step).clamp(-MAGNITUDES[-1], MAGNITUDES[-1])
    return (rounded * scale).flatten(-2)


def rounded_experts(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Routed experts as MXFP4 would hold them; gradients reach the parameters unchanged."""
    return {
        name: value + (round_mxfp4(value.detach()) - value.detach())
        for name, value in parameters.items()
        if ".experts." in name
    }
