"""Write trained parameters in the release's layout: bf16 matrices, MXFP4 experts, the recipe's image tower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from k3_sglang.kernels.mxfp4 import encode
from k3_sglang.reference.checkpoint import PREFIX, VISION_PREFIXES
from k3_sglang.tiny.checkpoint import prepare, write
from k3_sglang.tiny.data.vocabulary import BASE_TOKENS, VOCABULARY
from k3_sglang.tiny.recipe import files_for
from k3_sglang.tiny.train.run import CHECKPOINT_FILE
from k3_sglang.tiny.weights import A_LOG_PADDING, tensors

_FLOAT32 = ("dt_bias", "e_score_correction_bias")


def export(run: str | Path, directory: str | Path, *, force: bool = False) -> Path:
    """Write the parameters of a training run's checkpoint to a directory that the engine serves.

    Args:
        run: the training run's directory.
        directory: created when missing.
        force: allow a directory that is not empty.

    Raises:
        FileNotFoundError: the run has no checkpoint.
        FileExistsError: the directory is not empty and ``force`` is off.
        NotADirectoryError: the path is a file.
    """
    file = Path(run) / CHECKPOINT_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; give the directory of a training run that has saved")
    parameters: dict[str, Tensor] = torch.load(file, weights_only=True, map_location="cpu")["parameters"]
    target = prepare(directory, force=force)
    write(target, release_tensors(parameters), files_for(BASE_TOKENS), VOCABULARY)
    return target


def release_tensors(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the checkpoint by their full names, in the dtypes of the release."""
    for name, value in parameters.items():
        full = PREFIX + name
        if ".experts." in name:
            yield from _packed(full, value)
        elif name.endswith("A_log"):
            padded = torch.zeros(max(A_LOG_PADDING, value.shape[0]))
            padded[: value.shape[0]] = value
            yield full, padded
        elif name.endswith(_FLOAT32):
            yield full, value.float().clone()
        else:
            yield full, value.bfloat16()
    yield from ((name, value) for name, value in tensors(0) if name.startswith(VISION_PREFIXES))


def _packed(name: str, stacked: Tensor) -> Iterator[tuple[str, Tensor]]:
    """``....experts.w1`` [E, out, in] as the packed tensors of each expert."""
    block, _, part = name.rpartition(".")
    for expert, value in enumerate(stacked):
        packed, scale = encode(value)
        yield f"{block}.{expert}.{part}.weight_packed", packed
        yield f"{block}.{expert}.{part}.weight_scale", scale
