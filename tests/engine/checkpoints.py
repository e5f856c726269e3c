"""Checkpoints with one mistake, made of links to a good one and one rewritten file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
NAN_SCALE = 255
"""Scale byte of a damaged group of MXFP4 values."""


def with_changed_shard(checkpoint: Path, copy: Path, change: Callable[[Tensors], object]) -> Path:
    """Link a checkpoint's files into a new folder and rewrite the last shard; returns the folder."""
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).symlink_to(file)
    shard = max(copy.glob("*.safetensors"))
    tensors = load_file(shard)
    change(tensors)
    shard.unlink()
    save_file(tensors, shard)
    return copy


def damage_last_expert(tensors: Tensors) -> None:
    """Make one scale of the last expert a NaN: names, shapes and dtypes stay right."""
    name = max((name for name in tensors if name.endswith("w2.weight_scale")), key=_layer_and_expert)
    tensors[name][0, 0] = NAN_SCALE


def _layer_and_expert(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())
