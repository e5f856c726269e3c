"""A picture to normalised patches: scale down, put a chessboard behind transparency, pad with black, cut.

The order matters: transparency is resolved after scaling, in float32 and cut (not rounded) to whole colour values, and
the padding is black before normalisation. numpy and Pillow only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from k3_sglang.vision.config import Chessboard, MediaConfig
from k3_sglang.vision.geometry import Fitted, fit, image_tokens

__all__ = ["Patches", "image_tokens", "preprocess", "to_colour"]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_WIDE_GREY = ("I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes of 16-bit grey pictures."""


@dataclass(frozen=True)
class Patches:
    """One media item, ready for the tower."""

    pixels: Floats
    """[t * h * w, 3, patch, patch] float32, rows of patches from top left to bottom right."""
    grid: tuple[int, int, int]
    """Frames, patch rows, patch columns (t, h, w)."""


def preprocess(image: Image.Image, media: MediaConfig) -> Patches:
    """Patches of a decoded picture of any mode.

    Raises:
        ValueError: a picture of a mode that has no defined colours (32-bit integer or float pixels).
    """
    fitted = fit(*image.size, media)
    colour = to_colour(image)
    if (fitted.width, fitted.height) != colour.size:
        colour = colour.resize((fitted.width, fitted.height), Image.Resampling.BICUBIC)
    pixels = np.asarray(colour)
    if colour.mode == "RGBA":
        pixels = _over(pixels, media.background)
    padded = np.pad(pixels, ((0, fitted.pad_bottom), (0, fitted.pad_right), (0, 0)))
    return Patches(_cut(_normalise(padded, media), fitted), fitted.grid)


def to_colour(image: Image.Image) -> Image.Image:
    """RGBA for a picture with transparency, RGB for any other.

    16-bit grey keeps its high byte. An RGB picture with a key colour stays RGB, as in the released processor.
    """
    if image.mode in ("RGB", "RGBA"):
        return image
    if image.mode in _WIDE_GREY:
        high = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        return Image.fromarray(high).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"a picture of Pillow mode {image.mode!r}; allowed: at most 16 bits per channel")
    has_alpha = "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info
    return image.convert("RGBA" if has_alpha else "RGB")


def _over(pixels: Bytes, background: Chessboard) -> Bytes:
    """[H, W, 4] over a chessboard whose first square is in the top left corner; [H, W, 3]."""
    height, width = pixels.shape[:2]
    odd = (np.arange(height)[:, None] // background.square + np.arange(width) // background.square) % 2
    first, second = (
        (background.white, background.gray) if background.white_first else (background.gray, background.white)
    )
    board = np.where(odd == 0, np.float32(first), np.float32(second))[..., None]
    alpha = pixels[..., 3:].astype(np.float32) / np.float32(255)
    return (alpha * pixels[..., :3].astype(np.float32) + (1 - alpha) * board).astype(np.uint8)


def _normalise(pixels: Bytes, media: MediaConfig) -> Floats:
    """``(x / 255 - mean) / std`` per channel, [H, W, 3] float32."""
    mean, std = np.asarray(media.mean, np.float32), np.asarray(media.std, np.float32)
    return (pixels.astype(np.float32) / np.float32(255) - mean) / std


def _cut(pixels: Floats, fitted: Fitted) -> Floats:
    """[H, W, 3] to [h * w, 3, patch, patch]."""
    _, rows, columns = fitted.grid
    side = fitted.patch_size
    cells: Any = pixels.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(cells.reshape(rows * columns, 3, side, side))
