"""Golden images through the modules that serve images."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from safetensors.torch import load_file
from torch import Tensor

from k3_sglang.loading.slots import load_all
from k3_sglang.parity.golden import Golden
from k3_sglang.reference.checkpoint import VISION_PREFIXES
from k3_sglang.vision.config import VisionConfig
from k3_sglang.vision.projector import ImageEncoder
from k3_sglang.vision.table import build_vision_table
from k3_sglang.vision.tower import Grid


def image_encoder(golden: Golden) -> ImageEncoder:
    """Tower and projector of the golden checkpoint in float32.

    Raises:
        ValueError: the checkpoint has no vision configuration.
        CheckpointError: image tensors are missing, unknown or misshaped.
    """
    if golden.config.vision is None:
        raise ValueError(f"{golden.checkpoint}: config.json has no vision_config; image values need one")
    shards = [load_file(shard) for shard in sorted(golden.checkpoint.glob("*.safetensors"))]
    tensors = {n: t for shard in shards for n, t in shard.items() if n.startswith(VISION_PREFIXES)}
    encoder = ImageEncoder(VisionConfig.from_dict(golden.config.vision), torch.float32)
    load_all(build_vision_table(encoder), tensors.items(), str(golden.checkpoint))
    return encoder


def golden_features(golden: Golden) -> Iterator[tuple[Tensor, Grid, Tensor]]:
    """Patches, grid and the reference's float32 features of each image of the image prompts."""
    values = golden.tensors("image")
    for name in golden.raw_prompts["image"]:
        grids = [(int(t), int(h), int(w)) for t, h, w in values[f"{name}.grid_thws"].tolist()]
        patches = values[f"{name}.pixel_values"].split([t * h * w for t, h, w in grids])
        for number, (part, grid) in enumerate(zip(patches, grids, strict=True)):
            yield part, grid, values[f"{name}.features.{number}.fp32"]
