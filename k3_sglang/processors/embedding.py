"""Images in an engine step: placeholders in the prefix cache's keys, and feature rows in the place of placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from k3_sglang.compat import Modality, mm_schedule, prepare_mm_inputs
from k3_sglang.loading.slots import Slot
from k3_sglang.vision.config import VisionConfig
from k3_sglang.vision.projector import ImageEncoder
from k3_sglang.vision.table import build_vision_table
from k3_sglang.vision.tower import Grid

GRID = "image_grid_thw"
"""Key of a picture's patch grid [1, 3] in an SGLang data item."""


class ImageInputs(torch.nn.Module):
    """The image encoder of this process, whole on every rank, and how a step uses it.

    SGLang hands a step the pictures that its tokens touch, keeps features it has seen (by content, least recently used
    first out) and cuts them where a prefill is cut or a prefix was cached; here one picture becomes its features.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.encoder = ImageEncoder(config, torch.get_default_dtype())

    def slots(self) -> dict[str, Slot]:
        """Where the image tensors of a checkpoint go."""
        return build_vision_table(self.encoder)

    def features(self, items: Sequence[Any]) -> list[torch.Tensor]:
        """Rows of each picture, [tokens, text hidden]; each is encoded by itself."""
        device = self.encoder.projector.post_norm.device
        return [self.encoder(item.feature.to(device), _grid(item)) for item in items]

    def embed(self, input_ids: torch.Tensor, forward_batch: Any, model: torch.nn.Module) -> torch.Tensor | None:
        """Embeddings [T, C] of a prefill that touches pictures; None when the token ids say everything.

        Args:
            input_ids: [T]; positions of pictures hold values made from the picture's content, far outside the
                vocabulary, by which the prefix cache tells pictures apart. They are overwritten.
            model: has ``get_input_embeddings``.
        """
        if forward_batch.forward_mode.is_decode() or not forward_batch.contains_mm_inputs():
            return None
        functions = {Modality.IMAGE: self.features}
        return prepare_mm_inputs(input_ids, forward_batch, model, {}, data_embedding_funcs=functions)


def forget_features() -> None:
    """Drop features SGLang keeps by content: they belong to the weights they were computed with."""
    kept = mm_schedule.embedding_cache
    if kept is not None:
        kept.clear()


def _grid(item: Any) -> Grid:
    frames, rows, columns = item.model_specific_data[GRID][0].tolist()
    return frames, rows, columns
