"""The table from the release's image tensor names to parameters (architecture: checkpoint tensors of the release)."""

from __future__ import annotations

import torch

from k3_sglang.loading.slots import FLOATS, Slot
from k3_sglang.vision.projector import ImageEncoder

TOWER_PREFIX = "vision_tower."
PROJECTOR_PREFIX = "mm_projector."

Slots = dict[str, Slot]


def build_vision_table(encoder: ImageEncoder) -> Slots:
    """Slots of every image tensor of a release checkpoint; each is held whole, by every rank."""
    tower, projector = encoder.tower, encoder.projector
    side, hidden = tower.config.patch_size, tower.config.hidden_size
    slots: Slots = {
        f"{TOWER_PREFIX}patch_embed.proj.weight": _whole(tower.embedding.proj, hidden, 3, side, side),
        f"{TOWER_PREFIX}patch_embed.pos_emb.weight": _whole(tower.embedding.positions),
        f"{TOWER_PREFIX}encoder.final_layernorm.weight": _whole(tower.final_norm),
        f"{PROJECTOR_PREFIX}proj.0.weight": _whole(projector.fc0),
        f"{PROJECTOR_PREFIX}proj.2.weight": _whole(projector.fc2),
        f"{PROJECTOR_PREFIX}post_norm.weight": _whole(projector.post_norm),
    }
    for index, block in enumerate(tower.stack):
        name = f"{TOWER_PREFIX}encoder.blocks.{index}."
        slots |= {
            f"{name}norm0.weight": _whole(block.norm0),
            f"{name}wqkv.weight": _whole(block.wqkv),
            f"{name}wo.weight": _whole(block.wo),
            f"{name}norm1.weight": _whole(block.norm1),
            f"{name}mlp.fc0.weight": _whole(block.fc0),
            f"{name}mlp.fc1.weight": _whole(block.fc1),
        }
    return slots


def _whole(parameter: torch.Tensor, *stored_shape: int) -> Slot:
    """A tensor held whole; ``stored_shape`` where the file's shape is not the parameter's."""

    def write(tensor: torch.Tensor) -> None:
        parameter.copy_(tensor.reshape(parameter.shape))

    return Slot(stored_shape or tuple(parameter.shape), FLOATS, write)
