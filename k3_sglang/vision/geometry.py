"""Arithmetic of image sizes: what an image is scaled to, how it is padded, how many tokens it becomes.

Standard library only. Sizes are (width, height) in pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3_sglang.vision.config import MERGE, MediaConfig


@dataclass(frozen=True)
class Fitted:
    """The size an image is scaled to, and the padding that makes both sides whole tokens."""

    width: int
    height: int
    pad_right: int
    pad_bottom: int
    patch_size: int

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, patch rows and patch columns (t, h, w); an image is one frame."""
        rows = (self.height + self.pad_bottom) // self.patch_size
        columns = (self.width + self.pad_right) // self.patch_size
        return 1, rows, columns

    @property
    def tokens(self) -> int:
        """Feature rows, and so placeholder tokens."""
        return grid_tokens(self.grid)


def grid_tokens(grid: tuple[int, int, int]) -> int:
    """Feature rows of a media item of (t, h, w) patches: frames are averaged, 2 x 2 patches become one row."""
    _, rows, columns = grid
    return (rows // MERGE) * (columns // MERGE)


def fit(width: int, height: int, media: MediaConfig) -> Fitted:
    """Scale an image down (never up) towards both patch limits, then pad it to whole tokens.

    The limit on one side is never passed. The limit on all patches counts whole patches of the source, so rounding and
    padding can pass it by a little: 10,000 x 10,000 pixels become 258 x 258 patches where the release allows 65,536.

    Args:
        width: pixels of the source image, at least 1. height: likewise.

    Raises:
        ValueError: a side is below 1.
    """
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width}x{height} pixels; each side must have at least 1")
    patch, side_pixels = media.patch_size, media.side_limit * media.patch_size
    patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(media.patch_limit / patches), side_pixels / width, side_pixels / height)
    new_width = min(side_pixels, max(1, int(width * scale)))
    new_height = min(side_pixels, max(1, int(height * scale)))
    return Fitted(new_width, new_height, -new_width % media.token_side, -new_height % media.token_side, patch)


def image_tokens(width: int, height: int, media: MediaConfig) -> int:
    """Placeholder tokens of an image of this size, before any scaling; raises ValueError for a side below 1."""
    return fit(width, height, media).tokens
