"""Loading a checkpoint into the reference is total: nothing missing, nothing extra, nothing misshaped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3_sglang.config import ConfigError, K3Config
from k3_sglang.costs import total_parameters
from k3_sglang.reference.checkpoint import ReferenceCheckpointError, expected_tensors
from k3_sglang.reference.model import ReferenceModel

FIRST, LAYER_0 = "model-00001-of-000003.safetensors", "language_model.model.layers.0."


@pytest.fixture
def copy(tiny_dir: Path, tmp_path: Path) -> Path:
    """A checkpoint a test may damage."""
    return Path(shutil.copytree(tiny_dir, tmp_path / "copy"))


def edit(directory: Path, change: Callable[[dict[str, Tensor]], None], *, index_too: bool = True) -> None:
    """Change the first shard's tensors, and the index with them."""
    tensors = load_file(directory / FIRST)
    change(tensors)
    save_file(tensors, directory / FIRST)
    if index_too:
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != FIRST} | dict.fromkeys(
            tensors, FIRST
        )
        path.write_text(json.dumps(index))


def test_all_parameters_of_the_configuration_are_there(tiny_dir: Path) -> None:
    config = K3Config.from_dir(tiny_dir)
    model = ReferenceModel.from_dir(tiny_dir)
    held = sum(tensor.numel() for tensor in model.weights.values())
    padding = len(config.text.kda_layers) * (32 - config.text.kda.num_heads)
    assert held - padding == total_parameters(config.text)


def test_every_name_of_the_release_is_expected_at_release_size() -> None:
    from k3_sglang.tiny.recipe import CONFIG

    text = {**CONFIG["text_config"], "num_hidden_layers": 93, "num_experts": 896, "num_experts_per_token": 16}
    full = [*range(4, 93, 4), 93]
    kda = [layer for layer in range(1, 94) if layer not in full]
    text["linear_attn_config"] = {**text["linear_attn_config"], "full_attn_layers": full, "kda_layers": kda}
    assert len(expected_tensors(K3Config.from_dict({**CONFIG, "text_config": text}).text)) == 494_592 + 2_460


def test_float32_parameters_stay_float32_in_a_bf16_model(tiny_dir: Path) -> None:
    weights = ReferenceModel.from_dir(tiny_dir, torch.bfloat16).weights
    wide = {name.rsplit(".", 1)[-1] for name, tensor in weights.items() if tensor.dtype == torch.float32}
    assert wide == {"A_log", "dt_bias", "e_score_correction_bias"}


def test_unpacked_experts_give_the_same_model(copy: Path, tiny_dir: Path) -> None:
    from k3_sglang.kernels.mxfp4 import decode

    for shard in sorted(copy.glob("model-*.safetensors")):
        tensors = load_file(shard)
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            stem = name.removesuffix("_packed")
            tensors[stem] = decode(tensors.pop(name), tensors.pop(f"{stem}_scale")).bfloat16()
        save_file(tensors, shard)
    shards = {shard.name: load_file(shard) for shard in copy.glob("model-*.safetensors")}
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((copy / "config.json").read_text())
    del config["text_config"]["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    ids = list(range(40))
    assert torch.equal(ReferenceModel.from_dir(copy)(ids), ReferenceModel.from_dir(tiny_dir)(ids))


def test_a_missing_tensor_is_named(copy: Path) -> None:
    edit(copy, lambda tensors: tensors.__delitem__(f"{LAYER_0}self_attn.dt_bias"))
    with pytest.raises(ReferenceCheckpointError, match=r"1 of \d+ tensors are missing.*layers\.0\.self_attn\.dt_bias"):
        ReferenceModel.from_dir(copy)


@pytest.mark.parametrize("name", [f"{LAYER_0}extra.weight", "model.norm.weight"])
def test_an_unknown_tensor_is_named(copy: Path, name: str) -> None:
    edit(copy, lambda tensors: tensors.update({name: torch.zeros(3)}))
    with pytest.raises(ReferenceCheckpointError, match=f"unknown tensor '{name}'"):
        ReferenceModel.from_dir(copy)


def test_an_image_tower_is_unknown_to_a_configuration_without_one(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    del config["vision_config"]
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ReferenceCheckpointError, match=r"unknown tensor '(vision_tower|mm_projector)\."):
        ReferenceModel.from_dir(copy)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("input_layernorm.weight", torch.zeros(127), r"has shape \(127,\); config.json requires \(128,\)"),
        ("self_attn.A_log", torch.ones(32), "beyond its 4 heads where padding must be zero"),
        ("self_attn.A_log", torch.zeros(3), r"has shape \(3,\); config.json requires \(4,\)"),
        ("input_layernorm.weight", torch.zeros(128, dtype=torch.uint8), "only packed experts are uint8"),
    ],
    ids=["short", "A_log per channel", "A_log too short", "bytes"],
)
def test_a_wrong_tensor_is_named(copy: Path, name: str, tensor: Tensor, message: str) -> None:
    edit(copy, lambda tensors: tensors.update({LAYER_0 + name: tensor}))
    with pytest.raises(ReferenceCheckpointError, match=message):
        ReferenceModel.from_dir(copy)


def test_a_shard_that_disagrees_with_the_index_is_refused(copy: Path) -> None:
    edit(copy, lambda tensors: tensors.update({f"{LAYER_0}extra": torch.zeros(1)}), index_too=False)
    with pytest.raises(ReferenceCheckpointError, match="disagree about"):
        ReferenceModel.from_dir(copy)


def test_missing_index_and_config_say_so(copy: Path) -> None:
    (copy / "model.safetensors.index.json").unlink()
    with pytest.raises(ReferenceCheckpointError, match="does not exist"):
        ReferenceModel.from_dir(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        ReferenceModel.from_dir(copy)


@pytest.mark.parametrize("ids", [[], [2048], [-1]])
def test_ids_outside_the_vocabulary_are_refused(tiny_dir: Path, ids: list[int]) -> None:
    model = ReferenceModel.from_dir(tiny_dir)
    with pytest.raises(ValueError, match=r"need at least one, each in 0\.\.2047"):
        model(ids)
