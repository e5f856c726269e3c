"""Merged tower features to the text model's width (``mm_projector_type`` ``patchmergerv2``), and the pair of both."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3_sglang.layers.parallel import weight
from k3_sglang.vision.config import VisionConfig
from k3_sglang.vision.tower import Grid, VisionTower


class Projector(torch.nn.Module):
    """``RMSNorm(W2 gelu(W0 x))`` with the exact (erf) GELU, no biases; the norm's eps is ``projector_ln_eps``."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = config.projector_norm_eps
        self.fc0 = weight(config.merged_size, config.merged_size, dtype=dtype)
        self.fc2 = weight(config.text_hidden_size, config.merged_size, dtype=dtype)
        self.post_norm = weight(config.text_hidden_size, dtype=dtype)

    def forward(self, merged: Tensor) -> Tensor:
        """[T, 4 * C] to [T, text_hidden_size]."""
        projected = F.linear(F.gelu(F.linear(merged, self.fc0)), self.fc2)
        return F.rms_norm(projected, self.post_norm.shape, self.post_norm, self.eps)


class ImageEncoder(torch.nn.Module):
    """Tower and projector: the rows that stand in the place of a media item's placeholder tokens.

    Every tensor-parallel rank holds a whole copy; the release's has 0.45 B parameters.
    """

    def __init__(self, config: VisionConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.tower = VisionTower(config, dtype)
        self.projector = Projector(config, dtype)

    def forward(self, patches: Tensor, grid: Grid) -> Tensor:
        """Features of one media item, [h / 2 * w / 2, text_hidden_size]; arguments as :class:`VisionTower` takes."""
        return self.projector(self.tower(patches, grid))
