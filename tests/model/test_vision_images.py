"""Decoding of pictures that strangers send: formats, limits, damage, each with its error code."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from k3_sglang.vision.images import ImageError, ImageLimits, data_url_bytes, image_size, load_image

SMALL = ImageLimits(max_bytes=10_000, max_pixels=10_000)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A picture's file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """A picture that does not compress away."""
    return Image.effect_noise(size, 90).convert(mode)


def png_header(width: int, height: int) -> bytes:
    """A valid PNG that states a size and holds next to nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_each_format_is_decoded(kind: str) -> None:
    data = encoded(noise((31, 17)), kind)
    assert image_size(data) == (31, 17)
    assert load_image(data).size == (31, 17)


def test_a_cmyk_jpeg_and_a_16_bit_png_are_decoded() -> None:
    assert load_image(encoded(Image.new("CMYK", (9, 9), (10, 20, 30, 40)), "JPEG")).mode == "CMYK"
    assert load_image(encoded(Image.new("I;16", (9, 9), 40_000))).mode == "I;16"


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM"])
def test_a_format_outside_the_list_is_refused(kind: str) -> None:
    with pytest.raises(ImageError, match="allowed: PNG, JPEG, WEBP, GIF, BMP") as error:
        load_image(encoded(noise((32, 32)), kind))
    assert error.value.code == "image_format_unsupported"


@pytest.mark.parametrize("data", [b"", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\x89PNG\r\n\x1a\n"])
def test_bytes_that_are_no_picture_are_refused(data: bytes) -> None:
    with pytest.raises(ImageError) as error:
        load_image(data)
    assert error.value.code in ("image_format_unsupported", "image_undecodable")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("kept", [0.3, 0.7, 0.95])
def test_a_truncated_file_is_refused(kind: str, kept: float) -> None:
    data = encoded(noise((64, 64)), kind)
    with pytest.raises(ImageError) as error:
        load_image(data[: int(len(data) * kept)])
    assert error.value.code in ("image_undecodable", "image_format_unsupported")


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_after_a_png_signature_decode_or_give_an_image_error(tail: bytes) -> None:
    try:
        load_image(b"\x89PNG\r\n\x1a\n" + tail, SMALL)
    except ImageError as error:
        assert error.code in ("image_undecodable", "image_format_unsupported", "image_too_many_pixels")


@settings(deadline=None)
@given(st.integers(0, 400), st.integers(0, 255))
def test_a_jpeg_with_one_wrong_byte_decodes_or_gives_an_image_error(position: int, value: int) -> None:
    data = bytearray(encoded(Image.new("RGB", (24, 24), (9, 90, 200)), "JPEG"))
    data[position % len(data)] = value
    try:
        assert load_image(bytes(data), SMALL).size[0] >= 1
    except ImageError as error:
        assert error.code.startswith("image_")


@pytest.mark.parametrize("side", [101, 20_000, 60_000])
def test_a_header_that_promises_too_many_pixels_is_refused_before_decoding(side: int) -> None:
    with pytest.raises(ImageError, match="allowed: 10000") as error:
        load_image(png_header(side, side), SMALL)
    assert error.value.code == "image_too_many_pixels"


def test_the_pixel_limit_itself_is_allowed() -> None:
    data = encoded(Image.new("RGB", (100, 100)))
    assert load_image(data, SMALL).size == (100, 100)
    with pytest.raises(ImageError, match="100x101 pixels"):
        image_size(encoded(Image.new("RGB", (100, 101))), SMALL)


def test_too_many_bytes_are_refused_with_both_numbers() -> None:
    with pytest.raises(ImageError, match="20000 bytes; allowed: 10000") as error:
        load_image(b"\0" * 20_000, SMALL)
    assert error.value.code == "image_too_many_bytes"


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_refused(kind: str) -> None:
    data = encoded(noise((8, 8)), kind, save_all=True, append_images=[noise((8, 8))], duration=100)
    with pytest.raises(ImageError, match="allowed: a still picture") as error:
        load_image(data)
    assert error.value.code == "image_animated"


def test_previews_inside_a_jpeg_do_not_count_as_frames() -> None:
    data = encoded(noise((40, 20)), "MPO", save_all=True, append_images=[noise((10, 5))])
    assert load_image(data).size == (40, 20)


def test_an_exif_orientation_is_left_alone() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # viewers turn it by a quarter
    data = encoded(noise((40, 20)), "JPEG", exif=exif)
    assert image_size(data) == load_image(data).size == (40, 20)


# --- data URLs ----------------------------------------------------------------------------------------------------


def url(data: bytes, kind: str = "image/png") -> str:
    """A data URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@settings(deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["image/png", "image/jpeg", "IMAGE/svg+xml", "image/x-icon"]))
def test_data_urls_give_their_bytes(data: bytes, kind: str) -> None:
    assert data_url_bytes(url(data, kind)) == data


def test_the_stated_type_is_not_believed() -> None:
    assert load_image(data_url_bytes(url(encoded(noise((5, 5)), "JPEG"), "image/png"))).format == "JPEG"


@pytest.mark.parametrize(
    "source",
    [
        "https://example.com/cat.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "data:text/html;base64,AAAA",
        "data:image/png,AAAA",
        "",
        "iVBORw0KGgo=",
    ],
)
def test_other_sources_are_refused(source: str) -> None:
    with pytest.raises(ImageError, match="allowed: a data URL") as error:
        data_url_bytes(source)
    assert error.value.code == "image_source_unsupported"


@pytest.mark.parametrize("tail", ["AAA", "AA=A", "A A A", "%%%%", "AAAA\n", "ÄÄÄÄ"])
def test_broken_base64_is_refused(tail: str) -> None:
    with pytest.raises(ImageError, match="not base64") as error:
        data_url_bytes("data:image/png;base64," + tail)
    assert error.value.code == "image_not_base64"


@pytest.mark.parametrize("size", [10_001, 10_004, 1_000_000])
def test_a_data_url_with_too_many_bytes_is_refused(size: int) -> None:
    with pytest.raises(ImageError, match="allowed: 10000") as error:
        data_url_bytes(url(b"x" * size), SMALL)
    assert error.value.code == "image_too_many_bytes"
    assert len(data_url_bytes(url(b"x" * 10_000), SMALL)) == 10_000
