"""The image encoder by its definition: positions, rotation, attention within one item, merging, loading."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from k3_sglang.loading.slots import CheckpointError, load_all
from k3_sglang.vision.config import VisionConfig
from k3_sglang.vision.projector import ImageEncoder
from k3_sglang.vision.table import build_vision_table
from k3_sglang.vision.tower import NORM_EPS, frame_table, merge, rotary_table, rotate
from tests.model.vision_cases import VISION, random_encoder, random_patches

GRIDS = [(1, 2, 2), (1, 6, 8), (1, 4, 10), (1, 14, 2), (3, 4, 6)]


def by_definition(encoder: ImageEncoder, patches: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """The encoder in float64, one equation after the other, with loops where the tower has reshapes."""
    config, tower, projector = encoder.tower.config, encoder.tower, encoder.projector
    frames, rows, columns = grid

    def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()

    places = [(t, r, c) for t in range(frames) for r in range(rows) for c in range(columns)]
    table = tower.embedding.positions.double().permute(2, 0, 1).unsqueeze(0)
    spatial = F.interpolate(table, size=(rows, columns), mode="bilinear", align_corners=False)[0]
    x = patches.double().flatten(1) @ tower.embedding.proj.double().T
    half = config.hidden_size // 2
    for n, (t, r, c) in enumerate(places):
        x[n] += spatial[:, r, c]
        if frames > 1:
            for i in range(half):
                x[n, i] += math.sin(t * 10000 ** (-i / half))
                x[n, half + i] += math.cos(t * 10000 ** (-i / half))
    turn = torch.zeros(len(places), config.head_dim // 2, dtype=torch.float64)
    for n, (_, r, c) in enumerate(places):
        for i in range(config.head_dim // 4):
            f = 10000 ** (-4 * i / config.head_dim)
            turn[n, 2 * i], turn[n, 2 * i + 1] = c * f, r * f
    for block in tower.stack:
        q, k, v = (rms(x, block.norm0, NORM_EPS) @ block.wqkv.double().T).chunk(3, -1)
        heads = []
        for head in range(config.num_heads):
            at = slice(head * config.head_dim, (head + 1) * config.head_dim)
            turned = []
            for part in (q[:, at], k[:, at]):
                even, odd = part[:, 0::2], part[:, 1::2]
                pair = torch.stack((even * turn.cos() - odd * turn.sin(), even * turn.sin() + odd * turn.cos()), -1)
                turned.append(pair.flatten(1))
            scores = turned[0] @ turned[1].T / math.sqrt(config.head_dim)
            heads.append(torch.softmax(scores, -1) @ v[:, at])
        x = x + torch.cat(heads, -1) @ block.wo.double().T
        inner = F.gelu(rms(x, block.norm1, NORM_EPS) @ block.fc0.double().T, approximate="tanh")
        x = x + inner @ block.fc1.double().T
    x = rms(x, tower.final_norm, NORM_EPS).view(frames, rows, columns, -1).mean(0)
    merged = [
        torch.cat([x[2 * r + i, 2 * c + j] for i in (0, 1) for j in (0, 1)])
        for r in range(rows // 2)
        for c in range(columns // 2)
    ]
    inner = F.gelu(torch.stack(merged) @ projector.fc0.double().T)
    return rms(inner @ projector.fc2.double().T, projector.post_norm, config.projector_norm_eps)


@pytest.mark.parametrize("grid", GRIDS)
def test_features_follow_the_definition(grid: tuple[int, int, int]) -> None:
    encoder, patches = random_encoder(), random_patches(grid)
    features = encoder(patches, grid)
    assert features.shape == (grid[1] * grid[2] // 4, 20) and features.dtype == torch.float32
    torch.testing.assert_close(features.double(), by_definition(encoder, patches, grid), atol=2e-5, rtol=1e-4)


def test_bf16_features_are_close_to_float32() -> None:
    grid = (1, 6, 8)
    wide, patches = random_encoder(), random_patches(grid)
    narrow = ImageEncoder(wide.tower.config, torch.bfloat16)
    for to, source in zip(narrow.parameters(), wide.parameters(), strict=True):
        to.copy_(source)
    features = narrow(patches, grid)
    assert features.dtype == torch.bfloat16
    assert (features.float() - wide(patches, grid)).abs().mean() < 0.02


def test_rotation_keeps_lengths_and_depends_on_differences_only() -> None:
    table = rotary_table((1, 6, 6), 12, torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, 1, 12, generator=generator).expand(36, 1, 12) for _ in range(2))
    turned_q, turned_k = rotate(q, table)[:, 0], rotate(k, table)[:, 0]
    torch.testing.assert_close(turned_q.norm(dim=-1), q[:, 0].norm(dim=-1))
    scores = (turned_q @ turned_k.T).view(6, 6, 6, 6)
    torch.testing.assert_close(scores[1, 1, 3, 2], scores[2, 4, 4, 5])
    assert (scores[1, 1, 3, 2] - scores[1, 1, 2, 3]).abs() > 1e-3  # two rows down is not two columns right


def test_frames_share_rotations_and_differ_by_the_sinusoid() -> None:
    table = rotary_table((3, 2, 4), 12, torch.device("cpu")).view(3, 8, 6)
    assert torch.equal(table[0], table[2])
    sinusoid = frame_table(3, 8, torch.device("cpu"))
    torch.testing.assert_close(sinusoid[0], torch.tensor([0.0] * 4 + [1.0] * 4))
    torch.testing.assert_close(sinusoid[2, 1], torch.tensor(math.sin(2 * 10000**-0.25)))


def test_merging_lays_rows_before_columns() -> None:
    x = torch.arange(24.0).unsqueeze(-1)  # one channel, 4 rows of 6
    assert merge(x, (1, 4, 6)).tolist()[1] == [2, 3, 8, 9]
    both = torch.cat((x, x + 100))
    assert merge(both, (2, 4, 6)).tolist()[1] == [52, 53, 58, 59]


def test_bad_grids_and_shapes_are_refused_by_name() -> None:
    encoder = random_encoder()
    for grid, message in [
        ((1, 3, 4), "must be even"),
        ((1, 4, 514), "from 2 to 512"),
        ((1, 0, 4), "from 2 to 512"),
        ((5, 2, 2), "allowed: 1 to 4"),
        ((0, 2, 2), "allowed: 1 to 4"),
        ((1, 2, 4), r"allowed: \(8, 3, 14, 14\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            encoder(random_patches((1, 2, 2)), grid)


# --- loading ------------------------------------------------------------------------------------------------------


def stored(encoder: ImageEncoder) -> dict[str, torch.Tensor]:
    """Random tensors of every name and shape a checkpoint must hold."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(slot.shape, generator=generator) for name, slot in build_vision_table(encoder).items()}


def nan_encoder() -> ImageEncoder:
    """An encoder in which every parameter that loading forgets stays NaN."""
    encoder = ImageEncoder(VisionConfig.from_dict(VISION), torch.float32)
    for parameter in encoder.parameters():
        parameter.fill_(float("nan"))
    return encoder


def test_loading_fills_every_parameter_from_the_releases_names() -> None:
    encoder = nan_encoder()
    tensors = stored(encoder)
    assert len(tensors) == 6 + 6 * 2 == len(list(encoder.parameters()))
    assert load_all(build_vision_table(encoder), tensors.items(), "checkpoint") == len(tensors)
    assert not any(parameter.isnan().any() for parameter in encoder.parameters())
    patch = tensors["vision_tower.patch_embed.proj.weight"]
    assert patch.shape == (16, 3, 14, 14)
    patches = random_patches((1, 2, 2))
    by_convolution = F.conv2d(patches, patch).flatten(1)
    torch.testing.assert_close(F.linear(patches.flatten(1), encoder.tower.embedding.proj), by_convolution)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vision_tower.encoder.blocks.1.wo.weight", "tensors are missing: vision_tower.encoder.blocks.1.wo.weight"),
        ("mm_projector.proj.2.weight", "tensors are missing: mm_projector.proj.2.weight"),
    ],
)
def test_a_missing_tensor_is_named(name: str, message: str) -> None:
    encoder = nan_encoder()
    tensors = stored(encoder)
    del tensors[name]
    with pytest.raises(CheckpointError, match=message):
        load_all(build_vision_table(encoder), tensors.items(), "checkpoint")


def test_an_unknown_and_a_misshapen_tensor_are_named() -> None:
    encoder = nan_encoder()
    tensors = stored(encoder)
    with pytest.raises(CheckpointError, match=r"blocks\.2\.wo\.weight.* has no place in this model"):
        load_all(
            build_vision_table(encoder),
            [*tensors.items(), ("vision_tower.encoder.blocks.2.wo.weight", torch.ones(16, 24))],
            "checkpoint",
        )
    tensors["vision_tower.patch_embed.proj.weight"] = torch.ones(16, 588)
    with pytest.raises(CheckpointError, match=r"shape \(16, 588\); config.json requires \(16, 3, 14, 14\)"):
        load_all(build_vision_table(encoder), tensors.items(), "checkpoint")


def test_the_releases_encoder_has_the_published_size() -> None:
    release = VISION | {
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
    with torch.device("meta"):
        encoder = ImageEncoder(VisionConfig.from_dict(release))
    assert len(build_vision_table(encoder)) == 168
    assert round(sum(p.numel() for p in encoder.tower.parameters()) / 1e6, 1) == 401.2
    assert round(sum(p.numel() for p in encoder.projector.parameters()) / 1e6, 1) == 46.1
