"""Whether a checkpoint serves images: what the engine needs for them, or the reason why it takes text only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from k3_sglang.config import ARCHITECTURE, ConfigError, K3Config
from k3_sglang.vision.config import PREPROCESSOR_FILE, MediaConfig, VisionConfig


@dataclass(frozen=True)
class ImageSupport:
    """Everything about images that a checkpoint's files say."""

    vision: VisionConfig
    media: MediaConfig
    placeholder_id: int
    """Token id that stands for an image in a prompt (``media_placeholder_token_id``)."""


def why_text_only(directory: str | Path) -> str | None:
    """Why a checkpoint cannot serve images, or None when it can; only which files and keys are there is looked at.

    Raises:
        ConfigError: ``config.json`` cannot be read.
    """
    raw = _config_json(Path(directory))
    architecture = (raw.get("architectures") or [None])[0]
    if architecture != ARCHITECTURE:
        return f"architecture {architecture} is text only"
    if raw.get("vision_config") is None:
        return "config.json has no vision_config"
    if not (Path(directory) / PREPROCESSOR_FILE).is_file():
        return f"the checkpoint has no {PREPROCESSOR_FILE}, which says how pictures become patches"
    return None


def image_support(directory: str | Path) -> ImageSupport:
    """Read and check everything about images.

    Raises:
        ConfigError: the checkpoint serves text only, or its files contradict each other or this implementation.
    """
    reason = why_text_only(directory)
    if reason is not None:
        raise ConfigError(f"{directory} serves no images: {reason}")
    config, media = K3Config.from_dir(directory), MediaConfig.from_dir(directory)
    vision = VisionConfig.from_dict(config.vision or {})
    if media.patch_size != vision.patch_size:
        raise ConfigError(
            f"{PREPROCESSOR_FILE} cuts patches of {media.patch_size} pixels, "
            f"vision_config.patch_size is {vision.patch_size}; they must be equal"
        )
    if vision.text_hidden_size != config.text.hidden_size:
        raise ConfigError(
            f"vision_config.text_hidden_size is {vision.text_hidden_size}; "
            f"allowed: text_config.hidden_size = {config.text.hidden_size}"
        )
    return ImageSupport(vision, media, config.media_placeholder_token_id)


def _config_json(directory: Path) -> Mapping[str, Any]:
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; it must be a JSON object") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}; it must be a JSON object")
    return cast("dict[str, Any]", raw)
