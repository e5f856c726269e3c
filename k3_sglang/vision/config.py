"""Dimensions of the image tower (``config.json: vision_config``) and rules of preprocessing (``media_proc_cfg``).

Every key is checked: one that this implementation does not know, or a value it does not support, is an error.
Standard library only, so that a process without torch can compute token counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_sglang.config import ConfigError

PREPROCESSOR_FILE = "preprocessor_config.json"
"""File of a checkpoint directory that holds ``media_proc_cfg``."""

ROPE_MAX_SIDE = 512
"""Most patches along one side of an image: the released rotary table has this many rows and columns."""

MERGE = 2
"""Patches per side that make one token (``merge_kernel_size``)."""

_VISION_FIXED: dict[str, Any] = {
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "merge_kernel_size": [MERGE, MERGE],
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
}
"""Choices of the architecture: the one value that is implemented."""

_VISION_OPTIONAL: dict[str, Any] = {"video_attn_type": "spatial_temporal"}
"""The same for keys that a checkpoint may leave out: attention over all frames of an item together."""

_VISION_SIZES = (
    "patch_size",
    "init_pos_emb_height",
    "init_pos_emb_width",
    "init_pos_emb_time",
    "mm_hidden_size",
    "qkv_hidden_size",
    "text_hidden_size",
    "vt_hidden_size",
    "vt_intermediate_size",
    "vt_num_attention_heads",
    "vt_num_hidden_layers",
)

VISION_KEYS = frozenset({*_VISION_FIXED, *_VISION_OPTIONAL, *_VISION_SIZES, "projector_ln_eps"})
"""Every key of ``vision_config`` that could change a number."""

_VISION_WITHOUT_EFFECT = frozenset(
    {"_attn_implementation", "dtype", "model_type", "torch_dtype", "transformers_version"}
)
"""Keys by which the released code chooses kernels and classes; they change no number here."""

_MEDIA_VIDEO = frozenset({"in_patch_limit_each_frame", "sample_fps", "temporal_merge_kernel_size"})
"""Rules for video frames. The released processor takes images only, and so does this one."""

_MEDIA_KEYS = frozenset(
    {
        "in_patch_limit",
        "patch_limit_on_one_side",
        "patch_size",
        "merge_kernel_size",
        "image_mean",
        "image_std",
        "fixed_output_tokens",
        "transparent_bg_config",
        "transparent_bg_fill_stage",
        "config_type",
    }
)

_CHESSBOARD_KEYS = frozenset(
    {
        "pattern",
        "chessboard_square_size",
        "chessboard_square_on_top_left",
        "chessboard_white_value",
        "chessboard_gray_value",
    }
)


def _known(mapping: Mapping[str, Any], where: str, keys: Set[str]) -> None:
    for key, value in mapping.items():
        if key not in keys:
            raise ConfigError(f"{where}.{key} is {value!r}; this key is not known. Known: {', '.join(sorted(keys))}")


def _get(mapping: Mapping[str, Any], where: str, key: str) -> Any:
    if key not in mapping:
        raise ConfigError(f"{where}.{key} is missing; a K3 checkpoint must have it")
    return mapping[key]


def _exactly(mapping: Mapping[str, Any], where: str, key: str, allowed: Any) -> None:
    value = _get(mapping, where, key)
    value = list(value) if isinstance(value, tuple) else value
    if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
        raise ConfigError(f"{where}.{key} is {value!r}; allowed: {allowed!r}")


def _integer(mapping: Mapping[str, Any], where: str, key: str, low: int = 1, high: int | None = None) -> int:
    value = _get(mapping, where, key)
    if isinstance(value, int) and not isinstance(value, bool) and low <= value and (high is None or value <= high):
        return value
    limit = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise ConfigError(f"{where}.{key} is {value!r}; allowed: an integer {limit}")


def _positive(mapping: Mapping[str, Any], where: str, key: str) -> float:
    value = _get(mapping, where, key)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf"):
        return float(value)
    raise ConfigError(f"{where}.{key} is {value!r}; allowed: a number above 0")


@dataclass(frozen=True)
class VisionConfig:
    """MoonViT-V2 and its projector (``vision_config``)."""

    patch_size: int
    hidden_size: int
    qkv_size: int
    """Width of each of q, k and v: heads x head_dim; not the hidden size."""
    num_heads: int
    num_layers: int
    intermediate_size: int
    pos_emb_height: int
    pos_emb_width: int
    pos_emb_time: int
    """Frames that one media item may have."""
    projector_norm_eps: float
    text_hidden_size: int

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.qkv_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Width of one token before the projector: the channels of 2 x 2 patches side by side."""
        return MERGE * MERGE * self.hidden_size

    @classmethod
    def from_dict(cls, vision: Mapping[str, Any]) -> VisionConfig:
        """Build from a ``vision_config`` mapping.

        Raises:
            ConfigError: a key is missing, is not known, or has a value this implementation does not support.
        """
        where = "vision_config"
        _known(vision, where, VISION_KEYS | _VISION_WITHOUT_EFFECT)
        for key, allowed in (_VISION_FIXED | {k: v for k, v in _VISION_OPTIONAL.items() if k in vision}).items():
            _exactly(vision, where, key, allowed)
        size = {key: _integer(vision, where, key) for key in _VISION_SIZES}
        if size["mm_hidden_size"] != size["vt_hidden_size"]:
            raise ConfigError(
                f"{where}.mm_hidden_size is {size['mm_hidden_size']}; "
                f"allowed: vt_hidden_size = {size['vt_hidden_size']}, the width the tower hands to the projector"
            )
        heads = size["vt_num_attention_heads"]
        if size["qkv_hidden_size"] % (4 * heads):
            raise ConfigError(
                f"{where}.qkv_hidden_size is {size['qkv_hidden_size']}; allowed: a multiple of {4 * heads}, so that "
                f"each of {heads} heads holds rotary pairs for columns and rows"
            )
        return cls(
            patch_size=size["patch_size"],
            hidden_size=size["vt_hidden_size"],
            qkv_size=size["qkv_hidden_size"],
            num_heads=heads,
            num_layers=size["vt_num_hidden_layers"],
            intermediate_size=size["vt_intermediate_size"],
            pos_emb_height=size["init_pos_emb_height"],
            pos_emb_width=size["init_pos_emb_width"],
            pos_emb_time=size["init_pos_emb_time"],
            projector_norm_eps=_positive(vision, where, "projector_ln_eps"),
            text_hidden_size=size["text_hidden_size"],
        )


@dataclass(frozen=True)
class Chessboard:
    """What lies behind transparent pixels (``transparent_bg_config``)."""

    square: int
    """Side of a square in pixels."""
    white_first: bool
    """Whether the square in the top left corner is the white one."""
    white: int
    gray: int

    @classmethod
    def from_dict(cls, background: Mapping[str, Any]) -> Chessboard:
        """Build from a ``transparent_bg_config`` mapping; raises ConfigError as VisionConfig.from_dict does."""
        where = "media_proc_cfg.transparent_bg_config"
        _known(background, where, _CHESSBOARD_KEYS)
        _exactly(background, where, "pattern", "chessboard")
        white_first = _get(background, where, "chessboard_square_on_top_left")
        if not isinstance(white_first, bool):
            raise ConfigError(f"{where}.chessboard_square_on_top_left is {white_first!r}; allowed: true, false")
        return cls(
            square=_integer(background, where, "chessboard_square_size"),
            white_first=white_first,
            white=_integer(background, where, "chessboard_white_value", 0, 255),
            gray=_integer(background, where, "chessboard_gray_value", 0, 255),
        )


@dataclass(frozen=True)
class MediaConfig:
    """How an image becomes patches (``preprocessor_config.json: media_proc_cfg``)."""

    patch_size: int
    patch_limit: int
    """Patches an image is scaled down to, before padding (``in_patch_limit``)."""
    side_limit: int
    """Patches along one side, padding included (``patch_limit_on_one_side``)."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    background: Chessboard

    @property
    def token_side(self) -> int:
        """Pixels along one side of the square that becomes one token."""
        return MERGE * self.patch_size

    @classmethod
    def from_dict(cls, media: Mapping[str, Any]) -> MediaConfig:
        """Build from a ``media_proc_cfg`` mapping.

        Raises:
            ConfigError: a key is missing, is not known, or has a value this implementation does not support.
        """
        where = "media_proc_cfg"
        _known(media, where, _MEDIA_KEYS | _MEDIA_VIDEO)
        for key in _MEDIA_VIDEO & media.keys():
            _positive(media, where, key)
        if "config_type" in media:
            _exactly(media, where, "config_type", "media_proc.processors.moonvit.MoonViTMediaProcessorConfig")
        _exactly(media, where, "merge_kernel_size", MERGE)
        _exactly(media, where, "fixed_output_tokens", None)
        _exactly(media, where, "transparent_bg_fill_stage", "after_resize")
        side_limit = _integer(media, where, "patch_limit_on_one_side", MERGE, ROPE_MAX_SIDE)
        if side_limit % MERGE:
            raise ConfigError(f"{where}.patch_limit_on_one_side is {side_limit}; allowed: a multiple of {MERGE}")
        background = _get(media, where, "transparent_bg_config")
        if not isinstance(background, Mapping):
            raise ConfigError(f"{where}.transparent_bg_config is {background!r}; allowed: an object with `pattern`")
        return cls(
            patch_size=_integer(media, where, "patch_size"),
            patch_limit=_integer(media, where, "in_patch_limit"),
            side_limit=side_limit,
            mean=_three(media, where, "image_mean", low=0.0),
            std=_three(media, where, "image_std", low=1e-6),
            background=Chessboard.from_dict(background),
        )

    @classmethod
    def from_dir(cls, directory: str | Path) -> MediaConfig:
        """Read ``preprocessor_config.json`` of a checkpoint directory.

        Raises:
            ConfigError: the file is missing, is not JSON, or does not describe supported preprocessing.
        """
        path = Path(directory) / PREPROCESSOR_FILE
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"{path} does not exist; a K3 checkpoint with a vision_config has it") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        media = raw.get("media_proc_cfg") if isinstance(raw, Mapping) else None
        if not isinstance(media, Mapping):
            raise ConfigError(f"{path}: media_proc_cfg is {media!r}; it must be an object")
        return cls.from_dict(media)


def _three(media: Mapping[str, Any], where: str, key: str, low: float) -> tuple[float, float, float]:
    """One number per colour channel."""
    value = _get(media, where, key)
    numbers = isinstance(value, list) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in value)
    if not numbers or len(value) != 3 or not all(low <= v <= 1.0 for v in value):
        raise ConfigError(f"{where}.{key} is {value!r}; allowed: three numbers from {low} to 1, one per colour")
    red, green, blue = (float(v) for v in value)
    return red, green, blue
