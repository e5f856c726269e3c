"""What a checkpoint has to hold: the release's count, the golden files, and one message per kind of mistake."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from k3_sglang.config import K3Config, TextConfig
from k3_sglang.kernels.mxfp4 import GROUP_SIZE
from k3_sglang.loading import headers
from k3_sglang.loading.headers import HeaderError, StoredTensor, checkpoint_problems, compare, read_header, read_headers
from k3_sglang.loading.inventory import (
    MXFP4_GROUP_SIZE,
    TensorSpec,
    expected_tensors,
    expected_text_tensors,
    layer_and_expert,
)
from k3_sglang.tiny.recipe import CONFIG
from tests.model.test_config import release_text
from tests.model.vision_cases import VISION

RELEASE_TENSORS = 497_220
RELEASE_BYTES = 1.56e12
RELEASE_VISION = VISION | {
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "mm_hidden_size": 1024,
    "qkv_hidden_size": 1536,
    "text_hidden_size": 7168,
    "vt_hidden_size": 1024,
    "vt_intermediate_size": 4096,
    "vt_num_attention_heads": 12,
    "vt_num_hidden_layers": 27,
}


def test_the_release_has_the_published_number_of_tensors_and_bytes() -> None:
    config = K3Config("K3", TextConfig.from_dict(release_text()), RELEASE_VISION, 0, 0, 0)
    specs = expected_tensors(config)
    assert len(specs) == RELEASE_TENSORS
    stored = sum(torch.Size(spec.shape).numel() * (1 if spec.dtypes == ("U8",) else 2) for spec in specs.values())
    assert stored == pytest.approx(RELEASE_BYTES, rel=0.002)
    assert specs["language_model.model.layers.0.self_attn.A_log"].shape == (128,)


def test_the_scale_group_is_the_kernels() -> None:
    assert MXFP4_GROUP_SIZE == GROUP_SIZE


def test_the_golden_and_the_tiny_checkpoint_hold_exactly_what_is_expected(golden: Path, tiny_dir: Path) -> None:
    assert checkpoint_problems(golden / "checkpoint", images=True) == []
    assert checkpoint_problems(tiny_dir, images=True) == []


def test_text_only_checkpoints_lack_the_prefix() -> None:
    text = TextConfig.from_dict(CONFIG["text_config"])
    short, full = expected_text_tensors(text, prefix=""), expected_text_tensors(text)
    assert [f"language_model.{name}" for name in short] == list(full)
    assert list(short.values()) == list(full.values())


@pytest.mark.parametrize(
    ("name", "layer", "expert"),
    [
        ("language_model.model.layers.3.block_sparse_moe.experts.12.w1.weight_packed", 3, 12),
        ("language_model.model.layers.3.block_sparse_moe.shared_experts.up_proj.weight", 3, None),
        ("model.layers.10.mlp_res_norm.weight", 10, None),
        ("language_model.lm_head.weight", None, None),
        ("vision_tower.encoder.blocks.1.wo.weight", None, None),
    ],
)
def test_a_name_says_its_layer_and_expert(name: str, layer: int | None, expert: int | None) -> None:
    assert layer_and_expert(name) == (layer, expert)


@pytest.fixture
def copy(tiny_dir: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint by links; a test replaces the files it changes."""
    for file in tiny_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Replace the first shard by a changed one; the index stays."""
    path = directory / "model-00001-of-000003.safetensors"
    with safe_open(path, framework="pt") as shard:
        tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    change(tensors)
    path.unlink()
    save_file(tensors, path)


NORM = "language_model.model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tensors: tensors.pop(NORM), f"tensors are missing: {NORM} (128,)"),
        (
            lambda tensors: tensors.update({"language_model.extra": torch.ones(3)}),
            "have no place in the model that config.json describes: language_model.extra (3,) in model-00001",
        ),
        (
            lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.bfloat16)}),
            f"wrong shape: {NORM} has (64,) in model-00001-of-000003.safetensors, config.json requires",
        ),
        (
            lambda tensors: tensors.update({NORM: torch.ones(128, dtype=torch.int64)}),
            f"wrong dtype: {NORM} is I64 in model-00001-of-000003.safetensors, allowed: BF16, F32, F16",
        ),
    ],
    ids=["missing", "extra", "misshaped", "mistyped"],
)
def test_each_kind_of_mistake_is_one_line_that_names_the_tensor(
    copy: Path, change: Callable[[dict[str, torch.Tensor]], Any], expected: str
) -> None:
    rewrite(copy, change)
    (problem,) = checkpoint_problems(copy, images=True)
    assert problem.startswith(f"{copy}: ")
    assert expected in problem


def test_a_file_that_is_cut_off_or_too_long_or_no_safetensors_file_is_found(copy: Path) -> None:
    path = copy / "model-00002-of-000003.safetensors"
    whole = path.read_bytes()
    path.unlink()
    for content, expected in [
        (whole[:-1], f"{path} has {len(whole) - 1} bytes and its header describes {len(whole)}"),
        (whole + b"x", f"{path} has {len(whole) + 1} bytes"),
        (whole[:40], f"{path} is cut off or no safetensors file (40 bytes)"),
        (b"", f"{path} is cut off or no safetensors file (0 bytes)"),
        (struct.pack("<Q", 2) + b"[]", f"{path} has no readable header"),
        (struct.pack("<Q", 99) + b'{"a": {}}', f"{path} is cut off"),
        (struct.pack("<Q", 9) + b'{"a": {}}', f"{path} has no readable header"),
    ]:
        path.write_bytes(content)
        (problem,) = checkpoint_problems(copy, images=True)
        assert problem.startswith(expected)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_header_or_a_header_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(content)
    try:
        assert isinstance(read_header(path), dict)
    except HeaderError as error:
        assert str(path) in str(error)


def test_a_tensor_in_two_files_is_named_with_both(copy: Path) -> None:
    (copy / headers.INDEX_FILE).unlink()
    (copy / "twice.safetensors").symlink_to(copy / "model-00001-of-000003.safetensors")
    with pytest.raises(HeaderError, match=r"is in model-00001-of-000003.safetensors and in twice.safetensors"):
        read_headers(copy)


def test_a_vision_config_that_is_not_supported_is_a_problem_with_its_key(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps({**config, "vision_config": {"patch_size": 14}}), encoding="utf-8")
    (problem,) = checkpoint_problems(copy, images=True)
    assert problem.startswith("vision_config.")


@given(st.integers(0, 30))
def test_a_long_list_is_cut_and_counted(count: int) -> None:
    specs = {f"t{i}": TensorSpec((i,)) for i in range(count)}
    found: dict[str, StoredTensor] = {}
    lines = compare(found, specs, "here")
    assert len(lines) == min(count, 1)
    if count > headers.SHOWN:
        assert lines[0].endswith(f"t2 (2,) and {count - headers.SHOWN} more")
