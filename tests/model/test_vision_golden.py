"""Image features and logits of image prompts against the released reference, and what single mistakes would do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from k3_sglang.config import K3Config
from k3_sglang.loading.slots import load_all
from k3_sglang.reference.checkpoint import VISION_PREFIXES, load_weights
from k3_sglang.vision import projector, tower
from k3_sglang.vision.config import MediaConfig, VisionConfig
from k3_sglang.vision.geometry import image_tokens
from k3_sglang.vision.preprocess import Patches, preprocess
from k3_sglang.vision.projector import ImageEncoder
from k3_sglang.vision.table import build_vision_table
from tests.model.vision_cases import ReferenceWithImages

PROMPTS = ("one_image", "two_images")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FEATURE_LIMIT = {"fp32": 3e-6, "bf16": 2e-3}


@pytest.fixture(scope="module")
def expected(golden: Path) -> dict[str, Tensor]:
    """The reference's pixels, features and logits."""
    return load_file(golden / "expected" / "image.safetensors")


@pytest.fixture(scope="module")
def prompts(golden: Path) -> dict[str, Any]:
    """Ids of the image prompts, before and after expansion."""
    return json.loads((golden / "expected" / "prompts.json").read_text())["image"]


@pytest.fixture(scope="module")
def images(golden: Path, expected: dict[str, Tensor], prompts: dict[str, Any]) -> dict[str, list[Patches]]:
    """Patches of each prompt's pictures."""
    media = MediaConfig.from_dir(golden / "checkpoint")
    return {
        name: [preprocess(Image.fromarray(expected[f"image.{i}"].numpy()), media) for i in prompts[name]["images"]]
        for name in PROMPTS
    }


@pytest.fixture(scope="module")
def encoders(golden: Path) -> dict[str, ImageEncoder]:
    """The checkpoint's tower and projector in both types, totally loaded."""
    config = K3Config.from_dir(golden / "checkpoint")
    assert config.vision is not None
    shards = [load_file(shard) for shard in sorted((golden / "checkpoint").glob("*.safetensors"))]
    tensors = {n: t for shard in shards for n, t in shard.items() if n.startswith(VISION_PREFIXES)}
    loaded = {}
    for name, dtype in DTYPES.items():
        loaded[name] = ImageEncoder(VisionConfig.from_dict(config.vision), dtype)
        load_all(build_vision_table(loaded[name]), tensors.items(), "golden checkpoint")
    return loaded


def features_of(encoder: ImageEncoder, patches: list[Patches]) -> list[Tensor]:
    """Features of each picture."""
    return [encoder(torch.from_numpy(item.pixels), item.grid) for item in patches]


@pytest.mark.parametrize("name", PROMPTS)
def test_pixels_grids_and_token_counts_equal_the_reference(
    golden: Path, expected: dict[str, Tensor], prompts: dict[str, Any], images: dict[str, list[Patches]], name: str
) -> None:
    pixels = np.concatenate([item.pixels for item in images[name]])
    assert np.abs(pixels - expected[f"{name}.pixel_values"].numpy()).max() <= 1e-6
    assert [list(item.grid) for item in images[name]] == expected[f"{name}.grid_thws"].tolist()
    media, pad = MediaConfig.from_dir(golden / "checkpoint"), K3Config.from_dir(golden / "checkpoint")
    counts = [image_tokens(width, height, media) for width, height in prompts[name]["sizes"]]
    ids, left = [], list(counts)
    for token in prompts[name]["input_ids"]:
        ids += [token] * left.pop(0) if token == pad.media_placeholder_token_id else [token]
    assert ids == prompts[name]["expanded_ids"]


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", PROMPTS)
def test_features_equal_the_reference(
    expected: dict[str, Tensor],
    images: dict[str, list[Patches]],
    encoders: dict[str, ImageEncoder],
    name: str,
    kind: str,
) -> None:
    for number, features in enumerate(features_of(encoders[kind], images[name])):
        wanted = expected[f"{name}.features.{number}.{kind}"]
        assert features.dtype == wanted.dtype
        assert (features.float() - wanted.float()).abs().max() <= FEATURE_LIMIT[kind]


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", PROMPTS)
def test_logits_of_image_prompts_equal_the_reference(
    golden: Path,
    expected: dict[str, Tensor],
    prompts: dict[str, Any],
    images: dict[str, list[Patches]],
    encoders: dict[str, ImageEncoder],
    name: str,
    kind: str,
) -> None:
    config = K3Config.from_dir(golden / "checkpoint")
    model = ReferenceWithImages(config.text, load_weights(golden / "checkpoint", config, DTYPES[kind]))
    rows = torch.cat(features_of(encoders[kind], images[name]))
    logits = model.logits(prompts[name]["expanded_ids"], config.media_placeholder_token_id, rows).float()
    wanted = expected[f"{name}.logits.{kind}"].float()
    if kind == "fp32":
        assert (logits - wanted).abs().max() <= 1e-3
        assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
    else:
        assert (logits - wanted).abs().mean() <= 0.3
        assert (logits.argmax(-1) == wanted.argmax(-1)).float().mean() >= 0.7


# --- mistakes -----------------------------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def _norm_eps(value: float) -> Patch:
    return lambda patch: patch.setattr(tower, "NORM_EPS", value)


def _interpolate(**changes: Any) -> Patch:
    original = F.interpolate
    return lambda patch: patch.setattr(
        tower.F, "interpolate", lambda x, size, mode: original(x, size=size, **({"mode": mode} | changes))
    )


def _table(change: Callable[[Tensor], Tensor]) -> Patch:
    original = tower.rotary_table
    return lambda patch: patch.setattr(tower, "rotary_table", lambda *given: change(original(*given)))


def _swap_axes(table: Tensor) -> Tensor:
    return table.unflatten(-1, (-1, 2)).flip(-1).flatten(1)


def _block_axes(table: Tensor) -> Tensor:
    return table.unflatten(-1, (-1, 2)).transpose(1, 2).flatten(1)


def _gelu(inside: str, instead: str) -> Patch:
    original = F.gelu
    return lambda patch: patch.setattr(
        tower.F,
        "gelu",
        lambda x, approximate="none": original(x, approximate=instead if approximate == inside else approximate),
    )


def _causal(patch: pytest.MonkeyPatch) -> None:
    original = F.scaled_dot_product_attention
    patch.setattr(tower.F, "scaled_dot_product_attention", lambda *qkv: original(*qkv, is_causal=True))


def _columns_first(patch: pytest.MonkeyPatch) -> None:
    def merge(x: Tensor, grid: tower.Grid) -> Tensor:
        cells = x.view(grid[1] // 2, 2, grid[2] // 2, 2, -1)
        return cells.permute(0, 2, 3, 1, 4).reshape(len(x) // 4, -1)

    patch.setattr(tower, "merge", merge)


def _no_positions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tower.PatchEmbedding, "_positions", lambda embedding, grid: torch.zeros(()))


def _transposed_positions(patch: pytest.MonkeyPatch) -> None:
    original = tower.PatchEmbedding._positions

    def positions(self: tower.PatchEmbedding, grid: tower.Grid) -> Tensor:
        exchanged = original(self, (1, grid[2], grid[1]))
        return exchanged.view(grid[2], grid[1], -1).transpose(0, 1).flatten(0, 1)

    patch.setattr(tower.PatchEmbedding, "_positions", positions)


def _half_split(patch: pytest.MonkeyPatch) -> None:
    def rotate(x: Tensor, table: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous())
        return torch.view_as_real(pairs * table.unsqueeze(1)).transpose(-1, -2).flatten(-2)

    patch.setattr(tower, "rotate", rotate)


def _no_post_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        projector.Projector,
        "forward",
        lambda self, merged: F.linear(F.gelu(F.linear(merged, self.fc0)), self.fc2),
    )


def _projector_eps(patch: pytest.MonkeyPatch) -> None:
    original = projector.Projector.forward

    def forward(self: projector.Projector, merged: Tensor) -> Tensor:
        patch.setattr(self, "eps", tower.NORM_EPS)
        return original(self, merged)

    patch.setattr(projector.Projector, "forward", forward)


MISTAKES: dict[str, Patch] = {
    "vision_norm_eps_1e-5": _norm_eps(1e-5),
    "vision_norm_eps_1e-6": _norm_eps(1e-6),
    "vision_pos_emb_missing": _no_positions,
    "vision_pos_emb_transposed": _transposed_positions,
    "vision_pos_emb_bicubic": _interpolate(mode="bicubic"),
    "vision_pos_emb_align_corners": _interpolate(align_corners=True),
    "vision_pos_emb_antialias": _interpolate(antialias=True),
    "vision_rope_missing": _table(torch.ones_like),
    "vision_rope_xy_swapped": _table(_swap_axes),
    "vision_rope_blocked_axes": _table(_block_axes),
    "vision_rope_half_split": _half_split,
    "vision_causal": _causal,
    "vision_gelu_erf_in_blocks": _gelu("tanh", "none"),
    "vision_merge_column_first": _columns_first,
    "projector_gelu_tanh": _gelu("none", "tanh"),
    "projector_post_norm_missing": _no_post_norm,
    "projector_norm_eps_none": _projector_eps,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_single_mistake_moves_the_features_as_far_as_recorded_and_is_seen(
    golden: Path,
    expected: dict[str, Tensor],
    images: dict[str, list[Patches]],
    encoders: dict[str, ImageEncoder],
    monkeypatch: pytest.MonkeyPatch,
    mistake: str,
) -> None:
    recorded = json.loads((golden / "mutations.json").read_text())["image"][mistake]
    MISTAKES[mistake](monkeypatch)
    wrong = features_of(encoders["fp32"], images[recorded["prompt"]])
    moved = max(
        float((features - expected[f"{recorded['prompt']}.features.{number}.fp32"]).abs().max())
        for number, features in enumerate(wrong)
    )
    assert moved > FEATURE_LIMIT["fp32"]
    assert moved == pytest.approx(recorded["features_max_abs"], rel=0.03)
