"""Images to patches: sizes, padding, transparency, colour modes; golden values where the reference data is present."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from k3_sglang.vision.geometry import fit, image_tokens
from k3_sglang.vision.preprocess import preprocess, to_colour
from tests.model.vision_cases import BACKGROUND, MEDIA, media

RELEASE = media()


def whole(pixels: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
    """Patches back to a picture [H, W, 3] of colour values 0 to 255."""
    _, rows, columns = grid
    picture = pixels.reshape(rows, columns, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(rows * 14, columns * 14, 3)
    return (picture * 0.5 + 0.5) * 255


# --- golden -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(4))
def test_golden_preprocessing_cases_are_reproduced(golden: Path, number: int) -> None:
    case = json.loads((golden / "expected" / "prompts.json").read_text())["preprocess"][number]
    tensors = load_file(golden / "expected" / "preprocess.safetensors")
    rules = media(**case["config_overrides"])
    width, height = case["size"]
    fitted = fit(width, height, rules)
    assert [fitted.width, fitted.height] == case["resized"]
    assert [fitted.pad_right, fitted.pad_bottom] == case["padding"]
    assert image_tokens(width, height, rules) == case["num_tokens"]
    patches = preprocess(Image.fromarray(tensors[f"case.{number}.image"].numpy()), rules)
    assert list(patches.grid) == case["grid_thw"] == tensors[f"case.{number}.grid_thw"].tolist()
    difference = np.abs(patches.pixels - tensors[f"case.{number}.pixel_values"].numpy()).max()
    assert difference <= 1e-6


# --- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "grid", "tokens"),
    [
        ((1, 1), (1, 2, 2), 1),
        ((13, 27), (1, 2, 2), 1),
        ((28, 28), (1, 2, 2), 1),
        ((29, 28), (1, 2, 4), 2),
        ((1920, 1080), (1, 78, 138), 2691),
        ((3584, 3584), (1, 256, 256), 16384),  # exactly the patch limit: untouched
        ((7168, 1), (1, 2, 512), 256),  # exactly the side limit
        ((100_000, 1), (1, 2, 512), 256),
        ((1, 1_000_000), (1, 512, 2), 256),
        ((10_000, 10_000), (1, 258, 258), 16641),  # the rule of the release passes its own patch limit by rounding
    ],
)
def test_sizes_become_grids_and_tokens(size: tuple[int, int], grid: tuple[int, int, int], tokens: int) -> None:
    assert fit(*size, RELEASE).grid == grid
    assert image_tokens(*size, RELEASE) == tokens


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_an_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="each side must have at least 1"):
        image_tokens(*size, RELEASE)


@settings(deadline=None)
@given(st.integers(1, 40_000), st.integers(1, 40_000), st.integers(4, 65536), st.sampled_from([2, 8, 64, 512]))
def test_every_size_keeps_the_limits_and_is_never_enlarged(width: int, height: int, patches: int, side: int) -> None:
    fitted = fit(width, height, media(in_patch_limit=patches, patch_limit_on_one_side=side))
    frames, rows, columns = fitted.grid
    assert frames == 1
    assert 1 <= fitted.width <= width and 1 <= fitted.height <= height
    assert 0 <= fitted.pad_right < 28 and 0 <= fitted.pad_bottom < 28
    assert rows % 2 == columns % 2 == 0
    assert max(rows, columns) <= side
    assert fitted.tokens == rows * columns // 4
    # The rule counts whole patches of the source: a side of 27 pixels counts as one patch, not as almost two.
    assert fitted.width * fitted.height <= 4 * 14 * 14 * patches


# --- pixels -------------------------------------------------------------------------------------------------------


def test_patches_run_from_top_left_to_bottom_right_and_padding_is_black() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (17, 45, 3), np.uint8)
    patches = preprocess(Image.fromarray(pixels), RELEASE)
    assert patches.grid == (1, 2, 4)
    assert patches.pixels.shape == (8, 3, 14, 14) and patches.pixels.dtype == np.float32
    picture = whole(patches.pixels, patches.grid)
    np.testing.assert_allclose(picture[:17, :45], pixels, atol=1e-4)
    assert (picture[17:] == 0).all() and (picture[:, 45:] == 0).all()
    np.testing.assert_allclose(patches.pixels[5, 1, 2, 3], pixels[16, 17, 1] / 255 * 2 - 1, atol=1e-6)


def test_mean_and_deviation_apply_per_channel() -> None:
    rules = media(image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.25, 1.0])
    patches = preprocess(Image.new("RGB", (28, 28), (255, 51, 0)), rules)
    np.testing.assert_allclose(patches.pixels[:, :, 0, 0], np.tile([1.8, 0.0, -0.3], (4, 1)), atol=1e-6)


def test_the_chessboard_shows_through_after_scaling_and_starts_white() -> None:
    rules = media(patch_limit_on_one_side=2)  # 56 pixels become 28
    picture = whole(*_pixels_and_grid(Image.new("RGBA", (56, 56), (10, 20, 30, 0)), rules))
    assert (picture[0:8, 0:8].round() == 255).all()
    assert (picture[0:8, 8:16].round() == 180).all()
    assert (picture[8:16, 0:8].round() == 180).all()
    assert (picture[8:16, 8:16].round() == 255).all()


def test_the_chessboard_can_start_grey_in_other_squares() -> None:
    board = BACKGROUND | {"chessboard_square_size": 14, "chessboard_square_on_top_left": False}
    rules = media(transparent_bg_config=board)
    picture = whole(*_pixels_and_grid(Image.new("RGBA", (28, 28), (0, 0, 0, 0)), rules))
    assert (picture[:14, :14].round() == 180).all() and (picture[:14, 14:].round() == 255).all()


@settings(deadline=None)
@given(st.integers(0, 255), st.integers(0, 255))
def test_half_transparent_pixels_are_mixed_in_float32_and_cut(value: int, alpha: int) -> None:
    image = Image.new("RGBA", (1, 1), (value, value, value, alpha))
    pixels, grid = _pixels_and_grid(image, RELEASE)
    share = np.float32(alpha) / np.float32(255)
    wanted = int(share * np.float32(value) + (1 - share) * np.float32(255))
    assert round(float(whole(pixels, grid)[0, 0, 0])) == wanted


def test_padding_beside_a_transparent_picture_is_black_not_chessboard() -> None:
    picture = whole(*_pixels_and_grid(Image.new("RGBA", (8, 8), (0, 0, 0, 0)), RELEASE))
    assert (picture[:8, :8].round() == 255).all() and (picture[8:] == 0).all() and (picture[:, 8:] == 0).all()


def test_a_one_pixel_image_is_one_token() -> None:
    pixels, grid = _pixels_and_grid(Image.new("RGB", (1, 1), (255, 255, 255)), RELEASE)
    assert grid == (1, 2, 2)
    assert whole(pixels, grid).sum() == 3 * 255


def test_an_extreme_aspect_ratio_keeps_one_row_of_pixels() -> None:
    pixels, grid = _pixels_and_grid(Image.new("RGB", (9000, 1), (255, 0, 0)), RELEASE)
    assert grid == (1, 2, 512)
    picture = whole(pixels, grid)
    assert (picture[0, :, 0].round() == 255).all() and (picture[1:] == 0).all()


def _pixels_and_grid(image: Image.Image, rules: Any) -> tuple[np.ndarray, tuple[int, int, int]]:
    patches = preprocess(image, rules)
    return patches.pixels, patches.grid


# --- colour modes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "value", "becomes", "colour"),
    [
        ("1", 1, "RGB", (255, 255, 255)),
        ("L", 77, "RGB", (77, 77, 77)),
        ("LA", (77, 128), "RGBA", (77, 77, 77, 128)),
        ("RGB", (1, 2, 3), "RGB", (1, 2, 3)),
        ("RGBA", (1, 2, 3, 4), "RGBA", (1, 2, 3, 4)),
        ("CMYK", (0, 255, 255, 0), "RGB", (255, 0, 0)),
        ("HSV", (0, 0, 90), "RGB", (90, 90, 90)),
        ("I;16", 40_000, "RGB", (156, 156, 156)),
    ],
)
def test_colour_modes(mode: str, value: Any, becomes: str, colour: tuple[int, ...]) -> None:
    converted = to_colour(Image.new(mode, (3, 2), value))
    assert converted.mode == becomes
    assert converted.getpixel((2, 1)) == colour


def test_a_palette_with_and_without_transparency() -> None:
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert to_colour(palette).getpixel((0, 0)) == (10, 20, 30)
    palette.info["transparency"] = 1
    assert to_colour(palette).getpixel((0, 0)) == (10, 20, 30, 0)


def test_an_rgb_picture_with_a_key_colour_stays_opaque() -> None:
    image = Image.new("RGB", (2, 2), (1, 2, 3))
    image.info["transparency"] = (1, 2, 3)
    assert to_colour(image).mode == "RGB"


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_wider_than_16_bits_are_refused(mode: str) -> None:
    with pytest.raises(ValueError, match=f"Pillow mode '{mode}'"):
        preprocess(Image.new(mode, (2, 2)), RELEASE)


def test_the_release_has_the_limits_these_tests_use() -> None:
    assert (MEDIA["in_patch_limit"], MEDIA["patch_limit_on_one_side"]) == (RELEASE.patch_limit, RELEASE.side_limit)
