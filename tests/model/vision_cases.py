"""Small vision configurations as JSON would hold them, encoders with random weights, a reference with images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch

from k3_sglang.reference.model import ReferenceModel
from k3_sglang.vision.config import MediaConfig, VisionConfig
from k3_sglang.vision.projector import ImageEncoder

VISION: Final[dict[str, Any]] = {
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "init_pos_emb_height": 6,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 8,
    "linear_bias": False,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_hidden_size": 16,
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "patch_size": 14,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "qkv_hidden_size": 24,
    "text_hidden_size": 20,
    "vt_hidden_size": 16,
    "vt_intermediate_size": 32,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 2,
}
"""A ``vision_config`` in which no two widths are equal by chance."""

BACKGROUND: Final[dict[str, Any]] = {
    "pattern": "chessboard",
    "chessboard_square_size": 8,
    "chessboard_square_on_top_left": True,
    "chessboard_white_value": 255,
    "chessboard_gray_value": 180,
}

MEDIA: Final[dict[str, Any]] = {
    "in_patch_limit": 65536,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 16384,
    "sample_fps": 8.0,
    "temporal_merge_kernel_size": 4,
    "transparent_bg_config": BACKGROUND,
    "transparent_bg_fill_stage": "after_resize",
    "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
}
"""The release's ``media_proc_cfg``."""


def media(**changes: Any) -> MediaConfig:
    """The release's preprocessing with some keys changed."""
    return MediaConfig.from_dict(MEDIA | changes)


def random_encoder(seed: int = 0, **changes: Any) -> ImageEncoder:
    """A small float32 encoder whose every parameter is random."""
    generator = torch.Generator().manual_seed(seed)
    encoder = ImageEncoder(VisionConfig.from_dict(VISION | changes), torch.float32)
    for parameter in encoder.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return encoder


def random_patches(grid: tuple[int, int, int], seed: int = 1) -> torch.Tensor:
    """Patches [t * h * w, 3, 14, 14] from -1 to 1."""
    frames, rows, columns = grid
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(frames * rows * columns, 3, 14, 14, generator=generator) * 2 - 1


class ReferenceWithImages(ReferenceModel):
    """The text model whose vocabulary goes on after its last id with one more row per image feature."""

    def logits(self, ids: list[int], pad: int, rows: torch.Tensor) -> torch.Tensor:
        """Logits [T, vocab] for expanded ids, the n-th ``pad`` standing for the n-th row."""
        table = torch.cat((self.weights["model.embed_tokens.weight"], rows))
        longer = replace(self.config, vocab_size=len(table))
        model = ReferenceModel(longer, {**self.weights, "model.embed_tokens.weight": table})
        extra = iter(range(self.config.vocab_size, len(table)))
        return model([next(extra) if token == pad else token for token in ids])
