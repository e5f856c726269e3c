"""Weights of a running engine replaced from disk: all of them, or none.

SGLang writes a new checkpoint over the old one tensor by tensor, and reads the new one again when that fails. Around
its update, for our model class:

1. before anything is written, the new checkpoint's headers and dimensions are compared with what the model needs;
2. when reading fails after all (a damaged file), on any rank, every rank loads the previous checkpoint again;
3. when that fails too, the model stays marked as incomplete and refuses to compute: the engine ends with that message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from k3_sglang.compat import BeginWeightUpdateReqOutput, get_parallel
from k3_sglang.config import ConfigError, K3Config, TextConfig
from k3_sglang.layers.gpu import on_gpu
from k3_sglang.loading.headers import checkpoint_problems
from k3_sglang.vision.support import image_support

logger = logging.getLogger(__name__)

Outcome = tuple[bool, str]

WHOLE_ONLY = "this model takes whole checkpoints only: use /update_weights_from_disk"

INCOMPLETE = "The model is incomplete: load a whole checkpoint, or the engine ends with the next request."


def update_all_or_nothing(
    original: Callable[..., Outcome],
    updater: Any,
    model_path: str,
    load_format: str,
    weight_name_filter: Callable[[str], bool] | None = None,
    **options: Any,
) -> Outcome:
    """Around SGLang's ``WeightUpdater.update_weights_from_disk``: (success, message), as it returns them."""
    model, config = updater.get_model(), updater.model_config
    reason = _refusal(model, model_path, load_format, partial=weight_name_filter is not None)
    if reason is not None:
        return False, f"no weights were changed: {reason}"
    if on_gpu():
        options["recapture_cuda_graph"] = True  # loading replaces the experts' memory, which recorded graphs point to
    previous, restorable = config.model_path, model.from_checkpoint
    success, message = _attempt(original, updater, model_path, load_format, **options)
    if _on_every_rank(success):
        return success, message
    if success:
        message = "Another rank could not load the new checkpoint; its log says why."
    config.model_path = previous
    if not restorable:
        model.discard_weights()
        return False, f"{message} There were no weights of a checkpoint before. {INCOMPLETE}"
    restored, why_not = _attempt(original, updater, previous, load_format, **options)
    if _on_every_rank(restored):
        return False, f"{message} The previous weights, of {previous}, were loaded again."
    model.discard_weights()  # on this rank too, whatever it has: all ranks have to know the same
    return False, f"{message} The previous weights, of {previous}, could not be loaded again: {why_not} {INCOMPLETE}"


def refuse_session(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around ``SchedulerWeightUpdaterManager.begin_weight_update``: no update tensor by tensor."""
    return BeginWeightUpdateReqOutput(success=False, message=f"no weights were changed: {WHOLE_ONLY}")


def refuse_shared_memory(original: Callable[..., Outcome], updater: Any, request: Any) -> Outcome:
    """Around ``WeightUpdater.update_weights_from_ipc``, which needs no session."""
    return False, f"no weights were changed: {WHOLE_ONLY}"


def _refusal(model: Any, model_path: str, load_format: str, *, partial: bool) -> str | None:
    """Why this update is not begun; the same on every rank."""
    if get_parallel().pp_size > 1:
        return "pipeline stages cannot agree on one set of weights; start the engine again with the new checkpoint"
    if load_format not in ("auto", "safetensors"):
        return f"load_format is {load_format!r}; allowed: 'auto', 'safetensors'"
    if partial:
        return f"a part of the tensors was asked for; {WHOLE_ONLY}"
    directory = Path(model_path)
    try:
        new = K3Config.from_dir(directory).text
    except ConfigError as error:
        return str(error)
    for field in fields(TextConfig):
        had, has = getattr(model.model.k3, field.name), getattr(new, field.name)
        if had != has:
            return f"{directory / 'config.json'}: {field.name} is {has!r}, the running model has {had!r}"
    try:
        if model.image_support is not None and image_support(directory) != model.image_support:
            return f"{directory} encodes or prepares images otherwise than the running model; start the engine with it"
    except ConfigError as error:
        return str(error)
    problems = checkpoint_problems(directory, images=model.image_support is not None)
    return "; ".join(problems) or None


def _attempt(original: Callable[..., Outcome], updater: Any, path: str, load_format: str, **options: Any) -> Outcome:
    """One try; SGLang's own second reading of a damaged checkpoint raises out of it."""
    try:
        return original(updater, path, load_format, **options)
    except (ValueError, OSError, RuntimeError) as error:
        logger.error("reading %s failed: %s", path, error)
        return False, f"{error}."


def _on_every_rank(success: bool) -> bool:
    """Whether it holds on all tensor-parallel ranks; a damaged expert may be held by one of them only."""
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return success
    everyone = torch.tensor([int(success)])
    torch.distributed.all_reduce(everyone, torch.distributed.ReduceOp.MIN, group=parallel.tp_group.cpu_group)
    return bool(everyone.item())
