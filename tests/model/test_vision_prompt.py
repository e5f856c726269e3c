"""Prompts with pictures: placeholders become as many tokens as rows, every refusal names its picture."""

from __future__ import annotations

import base64
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from k3_sglang.vision.config import VisionConfig
from k3_sglang.vision.geometry import image_tokens
from k3_sglang.vision.images import ImageLimits
from k3_sglang.vision.prompt import expand
from k3_sglang.vision.support import ImageSupport
from tests.model.vision_cases import VISION, media

PAD = 7
SUPPORT = ImageSupport(VisionConfig.from_dict(VISION), media(), PAD)


def png(width: int, height: int, colour: int = 0) -> bytes:
    """An encoded picture of one grey."""
    file = io.BytesIO()
    Image.new("L", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


sizes = st.tuples(st.integers(1, 90), st.integers(1, 90))
pieces = st.lists(st.one_of(st.integers(0, PAD - 1), sizes), max_size=12)
"""A prompt: ordinary ids, and pictures by their size."""


@given(pieces)
def test_each_placeholder_becomes_the_rows_of_its_picture_and_text_stays(prompt: list[int | tuple[int, int]]) -> None:
    pictures = [piece for piece in prompt if isinstance(piece, tuple)]
    ids = [piece if isinstance(piece, int) else PAD for piece in prompt]
    expanded = expand(ids, [png(*size) for size in pictures], SUPPORT)
    wanted: list[int] = []
    places = []
    for piece in prompt:
        rows = 1 if isinstance(piece, int) else image_tokens(*piece, SUPPORT.media)
        if not isinstance(piece, int):
            places.append((len(wanted), rows))
        wanted += [piece if isinstance(piece, int) else PAD] * rows
    assert expanded.ids == wanted
    assert [(image.first, image.rows) for image in expanded.images] == places
    assert [len(image.patches.pixels) for image in expanded.images] == [4 * rows for _, rows in places]


def test_a_picture_may_come_as_bytes_base64_or_data_url_and_is_the_same() -> None:
    data = png(30, 20, 90)
    forms = [data, base64.b64encode(data).decode(), data_url(data)]
    prompts = [expand([1, PAD], [form], SUPPORT) for form in forms]
    assert {prompt.images[0].identity for prompt in prompts} == {prompts[0].images[0].identity}


def test_identity_is_the_content_after_preprocessing() -> None:
    def identity(data: bytes) -> bytes:
        return expand([PAD], [data], SUPPORT).images[0].identity

    assert identity(png(28, 56)) == identity(png(28, 56))
    assert identity(png(28, 56)) != identity(png(28, 56, 1))
    assert identity(png(28, 56)) != identity(png(56, 28))  # the same bytes in another grid
    assert identity(png(28, 56)) == identity(png(27, 55))  # the padding is black as well


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], r"has 1 image placeholder\(s\) \(token 7\), but image_data has 0"),
        ([png(1, 1)] * 2, r"has 1 image placeholder\(s\) \(token 7\), but image_data has 2"),
        (["https://example.org/a.png"], r"image_data\[0\]: image_source_unsupported: .*fetches nothing"),
        (["file:///a.png"], r"image_data\[0\]: image_source_unsupported: .*reads no files"),
        (["/a/b.png"], r"image_data\[0\]: image_source_unsupported: image source '/a/b.png'"),
        (["a/bc"], r"image_data\[0\]: image_format_unsupported: 3 bytes"),  # base64, never a path
        (["AAAAA"], r"image_data\[0\]: image_not_base64"),
        ([{"url": "x"}], r"image_data\[0\]: image_source_unsupported: image source of type dict"),
        ([None], r"image_data\[0\]: image_source_unsupported: image source of type NoneType"),
        (["data:image/png;base64,AAAA"], r"image_data\[0\]: image_format_unsupported"),
        (["data:text/plain;base64,AAAA"], r"image_data\[0\]: image_source_unsupported"),
        ([png(30, 30)[:50]], r"image_data\[0\]: image_undecodable"),
    ],
)
def test_what_is_refused_is_named(sources: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand([1, PAD, 2], sources, SUPPORT)


def test_limits_hold_for_each_picture() -> None:
    small = ImageLimits(max_bytes=90, max_pixels=100)
    for source in (png(11, 10), base64.b64encode(png(11, 10)).decode()):
        with pytest.raises(ValueError, match=r"image_data\[1\]: image_too_many_pixels: an image of 11x10"):
            expand([PAD, PAD], [png(1, 1), source], SUPPORT, limits=small)
    with pytest.raises(ValueError, match=r"image_data\[0\]: image_too_many_bytes: an image of 150 bytes; allowed: 90"):
        expand([PAD], ["A" * 200], SUPPORT, limits=small)


def test_a_prompt_that_gets_too_long_is_refused_before_anything_is_decoded() -> None:
    broken = png(560, 560)[:60]  # the header says 400 tokens, the rest is missing
    with pytest.raises(ValueError, match="the prompt has 403 tokens, 400 of them for images; allowed: 402"):
        expand([1, 2, 3, PAD], [broken], SUPPORT, max_len=402)
    with pytest.raises(ValueError, match="image_undecodable"):
        expand([1, 2, 3, PAD], [broken], SUPPORT, max_len=403)
