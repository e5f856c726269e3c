"""Vision and preprocessing configuration: every key counts, and what is wrong is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3_sglang.config import ConfigError
from k3_sglang.vision.config import VISION_KEYS, Chessboard, MediaConfig, VisionConfig
from tests.model.vision_cases import BACKGROUND, MEDIA, VISION


def test_a_vision_config_gives_its_dimensions() -> None:
    config = VisionConfig.from_dict(VISION)
    assert (config.hidden_size, config.qkv_size, config.head_dim, config.merged_size) == (16, 24, 12, 64)
    assert (config.pos_emb_height, config.pos_emb_width, config.pos_emb_time) == (6, 8, 4)


def test_a_preprocessor_config_gives_its_rules() -> None:
    config = MediaConfig.from_dict(MEDIA)
    assert (config.patch_limit, config.side_limit, config.token_side) == (65536, 512, 28)
    assert config.background == Chessboard(square=8, white_first=True, white=255, gray=180)


@pytest.mark.parametrize("key", sorted(VISION))
def test_a_missing_vision_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"vision_config\.{key} is missing"):
        VisionConfig.from_dict({k: v for k, v in VISION.items() if k != key})


@pytest.mark.parametrize("key", sorted(VISION))
@pytest.mark.parametrize("value", ["other", True, None, -3])
def test_a_vision_value_that_is_not_implemented_is_named_with_what_is_allowed(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"vision_config\.{key} is {value!r}; allowed: "):
        VisionConfig.from_dict(VISION | {key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("mm_hidden_size", 32), ("qkv_hidden_size", 20), ("video_attn_type", "per_frame")]
)
def test_vision_values_that_do_not_fit_each_other_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"vision_config\.{key} is {value!r}; allowed: "):
        VisionConfig.from_dict(VISION | {key: value})


def test_an_unknown_vision_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vision_config\.use_registers is True; this key is not known"):
        VisionConfig.from_dict(VISION | {"use_registers": True})


def test_keys_that_choose_kernels_change_nothing() -> None:
    assert VisionConfig.from_dict(VISION | {"_attn_implementation": "eager"}) == VisionConfig.from_dict(VISION)


@pytest.mark.parametrize("key", sorted(set(MEDIA) - {"config_type", *(k for k in MEDIA if "frame" in k)}))
def test_a_preprocessing_value_that_is_not_implemented_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"media_proc_cfg\.{key} is 'other'; allowed: "):
        MediaConfig.from_dict(MEDIA | {key: "other"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("patch_limit_on_one_side", 513),
        ("patch_limit_on_one_side", 9),
        ("in_patch_limit", 0),
        ("fixed_output_tokens", 64),
        ("image_std", [0.5, 0.0, 0.5]),
        ("image_mean", [0.5, 0.5]),
        ("sample_fps", -1),
        ("transparent_bg_fill_stage", "before_resize"),
        ("config_type", "media_proc.processors.other.Config"),
    ],
)
def test_a_preprocessing_value_outside_its_range_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"media_proc_cfg\.{key} is "):
        MediaConfig.from_dict(MEDIA | {key: value})


@pytest.mark.parametrize(
    "change", [{"pattern": "white"}, {"chessboard_white_value": 256}, {"chessboard_square_size": 0}, {"tile": 1}]
)
def test_another_background_is_refused(change: dict[str, Any]) -> None:
    (key,) = change
    with pytest.raises(ConfigError, match=rf"transparent_bg_config\.{key} is "):
        MediaConfig.from_dict(MEDIA | {"transparent_bg_config": BACKGROUND | change})


def test_an_unknown_preprocessing_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"media_proc_cfg\.crop is 1; this key is not known"):
        MediaConfig.from_dict(MEDIA | {"crop": 1})


def test_the_preprocessor_file_is_read_and_its_absence_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json does not exist"):
        MediaConfig.from_dir(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"media_proc_cfg": MEDIA}))
    assert MediaConfig.from_dir(tmp_path) == MediaConfig.from_dict(MEDIA)
    for text, message in (("{", "not valid JSON"), ("{}", "media_proc_cfg is None"), ("[]", "media_proc_cfg is None")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            MediaConfig.from_dir(tmp_path)


def test_the_golden_configs_are_accepted(golden: Path) -> None:
    raw = json.loads((golden / "checkpoint" / "config.json").read_text())
    assert VisionConfig.from_dict(raw["vision_config"]).num_layers == 2
    assert set(raw["vision_config"]) - VISION_KEYS == {"_attn_implementation"}
    assert MediaConfig.from_dir(golden / "checkpoint") == MediaConfig.from_dict(MEDIA)


@pytest.mark.parametrize(
    ("module", "absent"), [("geometry", "torch numpy PIL"), ("preprocess", "torch"), ("images", "torch")]
)
def test_sizes_and_pictures_need_no_torch(module: str, absent: str) -> None:
    code = f"import sys, k3_sglang.vision.{module}; print(*set('{absent}'.split()) & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == ""
