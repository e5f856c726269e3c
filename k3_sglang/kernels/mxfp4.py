"""MXFP4: 4-bit floats (E2M1) in groups of 32 that share one power-of-two scale (E8M0), as the release packs experts.

A byte holds two codes, the even input index in the low nibble; a code is ``sign << 3 | magnitude index``. A scale
byte s means 2^(s - 127); 255 is the format's NaN and is refused. Open Compute MX specification v1.0, section 5.
Both directions are exact: every decodable value fits in bfloat16 unless it is below its smallest subnormal.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_SIZE: Final = 32
"""Values that share one scale byte."""

MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of each 3-bit magnitude code."""

SCALE_BIAS: Final = 127
"""Exponent bias of a scale byte."""

NAN_SCALE: Final = 255
"""Scale byte that the format reserves for NaN."""

_MAX_EXPONENT: Final = 2
"""Exponent of the largest magnitude, 6 = 1.5 * 2^2."""


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Unpack to real values.

    Args:
        packed: [..., out, in / 2] uint8. scale: [..., out, in / 32] uint8.
        dtype: float32 (always exact) or bfloat16 (exact for |value| >= 2^-133).

    Returns:
        [..., out, in] in ``dtype``.

    Raises:
        ValueError: dtype or shapes do not fit together, or a scale byte is 255.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"MXFP4 needs uint8 codes and scales, got {packed.dtype} and {scale.dtype}")
    if (*packed.shape[:-1], packed.shape[-1] * 2) != (*scale.shape[:-1], scale.shape[-1] * GROUP_SIZE):
        raise ValueError(
            f"MXFP4 codes {tuple(packed.shape)} and scales {tuple(scale.shape)} do not fit together: "
            f"one scale belongs to {GROUP_SIZE // 2} bytes of codes"
        )
    if bool((scale == NAN_SCALE).any()):
        raise ValueError(f"MXFP4 scale byte {NAN_SCALE} means NaN; allowed are 0..{NAN_SCALE - 1}: the file is damaged")
    return unpack(packed, scale, dtype)


def unpack(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`decode` of bytes that were checked before; for weights kept packed and unpacked at every use.

    Args:
        packed: [..., out, in / 2] uint8. scale: [..., out, in / 32] uint8, none of them 255.

    Returns:
        [..., out, in] in ``dtype``.
    """
    pairs, powers = _tables(packed.device)
    grouped = F.embedding(packed.int(), pairs).view(*scale.shape, GROUP_SIZE)
    return grouped.mul_(F.embedding(scale.int(), powers)).flatten(-2).to(dtype)


@lru_cache(maxsize=4)
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Both values of every code byte, [256, 2], and every scale, [256, 1], float32."""
    with torch.inference_mode(False):
        values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=device)
        byte = torch.arange(256, device=device)
        pairs = torch.stack((values[byte & 0xF], values[byte >> 4]), -1)
        return pairs, _powers_of_two(byte).unsqueeze(-1)


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Pack real values: per group the scale that puts the largest magnitude in [4, 8), codes rounded to nearest even.

    Magnitudes above 6 times the scale saturate. Values that :func:`decode` produced come back as the same values.

    Args:
        values: [..., out, in], finite, any float dtype; ``in`` divisible by 32.

    Returns:
        packed [..., out, in / 2] and scale [..., out, in / 32], uint8.

    Raises:
        ValueError: ``in`` is not divisible by 32, or a value is not finite.
    """
    if values.shape[-1] % GROUP_SIZE:
        raise ValueError(
            f"MXFP4 packs groups of {GROUP_SIZE}: the last axis is {values.shape[-1]}, pad it to a multiple"
        )
    if not bool(torch.isfinite(values).all()):
        raise ValueError("MXFP4 cannot hold infinities or NaN; the values to pack must be finite")
    # float64: neither the division by a subnormal scale nor its result leaves the range.
    groups = values.double().unflatten(-1, (-1, GROUP_SIZE))
    _, exponent = torch.frexp(groups.abs().amax(-1))  # mantissa in [0.5, 1)
    scale = (exponent - 1 - _MAX_EXPONENT + SCALE_BIAS).clamp(0, NAN_SCALE - 1)
    scaled = groups / torch.pow(2.0, (scale - SCALE_BIAS).double()).unsqueeze(-1)
    codes = _nearest_code(scaled.abs()) | (torch.signbit(scaled).to(torch.uint8) << 3)
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4), scale.to(torch.uint8)


def _nearest_code(magnitude: Tensor) -> Tensor:
    """Index in :data:`MAGNITUDES` of the nearest value; ties go to the even index (the even mantissa)."""
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for lower in range(len(MAGNITUDES) - 1):
        middle = (MAGNITUDES[lower] + MAGNITUDES[lower + 1]) / 2
        above = magnitude >= middle if lower % 2 else magnitude > middle
        codes += above.to(torch.uint8)
    return codes


def _powers_of_two(scale: Tensor) -> Tensor:
    """2^(scale - 127) in float32, built from bits so that it is exact; byte 0 is the subnormal 2^-127."""
    bits = torch.arange(256, dtype=torch.int32, device=scale.device) << 23
    bits[0] = 1 << 22
    return bits.view(torch.float32)[scale.long()]
