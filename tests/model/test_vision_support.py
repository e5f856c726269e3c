"""Which checkpoints serve images, why others do not, and files that contradict each other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3_sglang.config import ConfigError
from k3_sglang.vision.support import image_support, why_text_only

Change = Callable[[str, Callable[[dict[str, Any]], object]], None]


@pytest.fixture
def directory(tiny_dir: Path, tmp_path: Path) -> Path:
    """The JSON files of a tiny K3, free to be changed."""
    for file in tiny_dir.glob("*.json"):
        shutil.copy(file, tmp_path)
    return tmp_path


@pytest.fixture
def change(directory: Path) -> Change:
    """Function that changes a JSON file of the directory in place."""

    def apply(name: str, edit: Callable[[dict[str, Any]], object]) -> None:
        content = json.loads((directory / name).read_text(encoding="utf-8"))
        edit(content)
        (directory / name).write_text(json.dumps(content), encoding="utf-8")

    return apply


def test_a_checkpoint_with_tower_and_rules_serves_images(directory: Path) -> None:
    assert why_text_only(directory) is None
    support = image_support(directory)
    assert support.placeholder_id == json.loads((directory / "config.json").read_text())["media_placeholder_token_id"]
    assert support.vision.patch_size == support.media.patch_size == 14


def test_without_a_vision_config_it_is_text_only(directory: Path, change: Change) -> None:
    change("config.json", lambda config: config.pop("vision_config"))
    assert why_text_only(directory) == "config.json has no vision_config"
    with pytest.raises(ConfigError, match="serves no images: config.json has no vision_config"):
        image_support(directory)


def test_without_rules_for_pictures_it_is_text_only_and_says_which_file_is_missing(directory: Path) -> None:
    (directory / "preprocessor_config.json").unlink()
    assert "has no preprocessor_config.json" in str(why_text_only(directory))


def test_the_text_only_architecture_is_text_only(directory: Path, change: Change) -> None:
    change("config.json", lambda config: config.update(architectures=["KimiK3LinearForCausalLM"]))
    assert why_text_only(directory) == "architecture KimiK3LinearForCausalLM is text only"


@pytest.mark.parametrize("content", ["[]", "{", ""])
def test_a_config_that_is_no_object_is_an_error(directory: Path, content: str) -> None:
    (directory / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json .*must be a JSON object"):
        why_text_only(directory)


def test_patches_of_two_sizes_are_an_error(directory: Path, change: Change) -> None:
    change("preprocessor_config.json", lambda file: file["media_proc_cfg"].update(patch_size=16))
    with pytest.raises(ConfigError, match="cuts patches of 16 pixels, vision_config.patch_size is 14"):
        image_support(directory)


def test_features_of_another_width_than_the_text_model_are_an_error(directory: Path, change: Change) -> None:
    change("config.json", lambda config: config["vision_config"].update(text_hidden_size=64))
    with pytest.raises(ConfigError, match=r"text_hidden_size is 64; allowed: text_config.hidden_size = 128"):
        image_support(directory)
