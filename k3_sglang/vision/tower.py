"""MoonViT-V2: patches of one media item to merged features.

Facts, each with its ``vision_config`` key; N = t * h * w patches of a media item, C = ``vt_hidden_size``:

- patch embedding without bias, plus a learned table [H, W, C] stretched to the item's grid (``pos_emb_type``
  ``divided_fixed``, bilinear); items of several frames also get a fixed sinusoid over frames.
- ``vt_num_hidden_layers`` blocks: attention over all patches of the item and none of another, then an MLP with
  tanh-GELU; RMSNorm before each and at the end. No biases anywhere.
- q, k and v are ``qkv_hidden_size`` wide, which is not C. Rotary embedding over columns and rows, pairs interleaved.
- the norms have no configured eps: torch then takes float32's machine epsilon, in bf16 models too.
- frames are averaged and 2 x 2 patches laid side by side (``merge_type`` ``sd2_tpool``).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from k3_sglang.layers.parallel import weight
from k3_sglang.vision.config import MERGE, ROPE_MAX_SIDE, VisionConfig

Grid = tuple[int, int, int]
"""Frames, patch rows, patch columns (t, h, w) of a media item."""

NORM_EPS = torch.finfo(torch.float32).eps
"""eps of every norm in the tower."""

THETA = 10000.0
"""Base of the rotary frequencies and of the sinusoid over frames."""


def _norm(x: Tensor, norm_weight: Tensor) -> Tensor:
    """RMSNorm whose weight takes part before the one rounding; the text model rounds before its weight."""
    return F.rms_norm(x, norm_weight.shape, norm_weight, NORM_EPS)


def rotary_table(grid: Grid, head_dim: int, device: torch.device) -> Tensor:
    """Rotations of each patch: [N, head_dim / 2] complex64, pair 2i turned by the column, pair 2i + 1 by the row.

    The frequency of pairs 2i and 2i + 1 is ``THETA ** (-4 i / head_dim)``. Frames share their rotations.
    """
    frames, rows, columns = grid
    exponent = torch.arange(0, head_dim, 4, dtype=torch.float32, device=device) / head_dim
    frequency = 1.0 / THETA**exponent
    place = torch.arange(rows * columns, dtype=torch.float32, device=device)
    by_column = (place % columns).unsqueeze(-1) * frequency
    by_row = torch.div(place, columns, rounding_mode="floor").unsqueeze(-1) * frequency
    angle = torch.stack((by_column, by_row), -1).flatten(1)
    return torch.polar(torch.ones_like(angle), angle).repeat(frames, 1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1) of [N, heads, head_dim] by ``table`` [N, head_dim / 2], in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table.unsqueeze(1)).flatten(-2).to(x.dtype)


def frame_table(frames: int, width: int, device: torch.device) -> Tensor:
    """Sinusoid over frames, [frames, width] float32: sines in the first half, cosines in the second."""
    half = width // 2
    frequency = 1.0 / THETA ** (torch.arange(half, dtype=torch.float32, device=device) / half)
    angle = torch.arange(frames, dtype=torch.float32, device=device).unsqueeze(-1) * frequency
    return torch.cat((angle.sin(), angle.cos()), -1)


class PatchEmbedding(torch.nn.Module):
    """Patches to channels, plus where they are."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.max_frames = config.pos_emb_time
        self.proj = weight(config.hidden_size, 3 * config.patch_size**2, dtype=dtype)
        self.positions = weight(config.pos_emb_height, config.pos_emb_width, config.hidden_size, dtype=dtype)

    def forward(self, patches: Tensor, grid: Grid) -> Tensor:
        """[N, 3, patch, patch] to [N, C] in the model dtype."""
        embedded = F.linear(patches.flatten(1).to(self.proj.dtype), self.proj)
        return embedded + self._positions(grid)

    def _positions(self, grid: Grid) -> Tensor:
        frames, rows, columns = grid
        table = self.positions
        if table.shape[:2] != (rows, columns):
            channels_first = table.permute(2, 0, 1).unsqueeze(0)
            stretched = F.interpolate(channels_first, size=(rows, columns), mode="bilinear")
            table = stretched[0].permute(1, 2, 0)
        flat = table.flatten(0, 1)
        if frames == 1:
            return flat
        over_time = frame_table(frames, flat.shape[-1], flat.device).to(flat.dtype)
        return (flat + over_time.unsqueeze(1)).flatten(0, 1)


class VisionBlock(torch.nn.Module):
    """One encoder block: attention, then MLP, each on the normed stream."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.norm0 = weight(hidden, dtype=dtype)
        self.wqkv = weight(3 * config.qkv_size, hidden, dtype=dtype)
        self.wo = weight(hidden, config.qkv_size, dtype=dtype)
        self.norm1 = weight(hidden, dtype=dtype)
        self.fc0 = weight(inner, hidden, dtype=dtype)
        self.fc1 = weight(hidden, inner, dtype=dtype)

    def forward(self, stream: Tensor, rotations: Tensor) -> Tensor:
        """Advance the stream [N, C] of one media item."""
        stream = stream + F.linear(self._attend(_norm(stream, self.norm0), rotations), self.wo)
        inner = F.gelu(F.linear(_norm(stream, self.norm1), self.fc0), approximate="tanh")
        return stream + F.linear(inner, self.fc1)

    def _attend(self, x: Tensor, rotations: Tensor) -> Tensor:
        """Full attention among the N patches, [N, qkv_size]; torch's kernels need no N x N matrix in memory."""
        q, k, v = F.linear(x, self.wqkv).view(-1, 3, self.num_heads, self.head_dim).unbind(1)
        q, k = rotate(q, rotations), rotate(k, rotations)
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


class VisionTower(torch.nn.Module):
    """The encoder. It takes one media item at a time: features never depend on what else is in a request."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = PatchEmbedding(config, dtype)
        self.stack = tuple(VisionBlock(config, dtype) for _ in range(config.num_layers))
        self.blocks = torch.nn.ModuleList(self.stack)
        self.final_norm = weight(config.hidden_size, dtype=dtype)

    def forward(self, patches: Tensor, grid: Grid) -> Tensor:
        """Merged features of one media item.

        Args:
            patches: [N, 3, patch, patch], normalised, any float dtype.
            grid: (t, h, w) with N = t * h * w, h and w even.

        Returns:
            [h / 2 * w / 2, 4 * C] in the model dtype.

        Raises:
            ValueError: patches and grid do not belong together, or the grid is outside the tower's limits.
        """
        self._check(patches, grid)
        stream = self.embedding(patches, grid)
        rotations = rotary_table(grid, self.config.head_dim, stream.device)
        for block in self.stack:
            stream = block(stream, rotations)
        return merge(_norm(stream, self.final_norm), grid)

    def _check(self, patches: Tensor, grid: Grid) -> None:
        frames, rows, columns = grid
        side, max_frames = self.config.patch_size, self.config.pos_emb_time
        if not 1 <= frames <= max_frames:
            raise ValueError(f"grid {grid}: {frames} frames; allowed: 1 to {max_frames}")
        if any(n % MERGE or not MERGE <= n <= ROPE_MAX_SIDE for n in (rows, columns)):
            raise ValueError(f"grid {grid}: rows and columns must be even, from {MERGE} to {ROPE_MAX_SIDE}")
        wanted = (frames * rows * columns, 3, side, side)
        if tuple(patches.shape) != wanted:
            raise ValueError(f"patches of shape {tuple(patches.shape)} for grid {grid}; allowed: {wanted}")


def merge(x: Tensor, grid: Grid) -> Tensor:
    """Average frames, then lay 2 x 2 patches side by side: [t * h * w, C] to [h / 2 * w / 2, 4 * C], rows first."""
    frames, rows, columns = grid
    cells = x.view(frames, rows // MERGE, MERGE, columns // MERGE, MERGE, -1)
    pooled = cells[0] if frames == 1 else cells.mean(0)
    return pooled.transpose(1, 2).reshape(rows * columns // MERGE**2, -1)
