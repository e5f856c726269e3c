"""Changed copies of a checkpoint in the release's layout, for tests of what a change does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"
SHARD_FILE = "model-00001-of-000001.safetensors"

Tensors = dict[str, Tensor]


def read_tensors(directory: Path) -> Tensors:
    """Every tensor of a checkpoint by its name in the file."""
    tensors: Tensors = {}
    for shard in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def write_checkpoint(
    source: Path, directory: Path, tensors: Mapping[str, Tensor], text_config: Mapping[str, Any] | None = None
) -> Path:
    """A copy of ``source`` with other tensors, in one shard, and some keys of ``text_config`` replaced.

    A value that is a mapping replaces keys inside the mapping that is there (``linear_attn_config``).
    """
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != INDEX_FILE:
            shutil.copyfile(file, directory / file.name)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / SHARD_FILE)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(tensors, SHARD_FILE)}
    (directory / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    if text_config:
        path = directory / "config.json"
        raw = json.loads(path.read_text(encoding="utf-8"))
        for key, value in text_config.items():
            old = raw["text_config"][key]
            raw["text_config"][key] = {**old, **value} if isinstance(value, Mapping) else value
        path.write_text(json.dumps(raw), encoding="utf-8")
    return directory
