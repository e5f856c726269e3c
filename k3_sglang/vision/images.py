"""Image bytes or a data URL to a decoded picture, within limits that hold before anything large is allocated.

Nothing is fetched here: remote URLs and files are refused, whoever may fetch them hands over bytes.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from dataclasses import dataclass
from typing import Literal

from PIL import Image, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are decoded. The media type that a data URL states is not believed; the bytes decide."""

_ANIMATED = ("PNG", "WEBP", "GIF")
"""Formats whose further frames are an animation; in a JPEG they are previews beside the picture."""

_DATA_URL = re.compile(r"data:image/[A-Za-z0-9.+-]+;base64,", re.IGNORECASE)

ImageErrorCode = Literal[
    "image_source_unsupported",
    "image_not_readable",  # only where sources are read, which is not here
    "image_not_base64",
    "image_too_many_bytes",
    "image_too_many_pixels",
    "image_format_unsupported",
    "image_animated",
    "image_undecodable",
]


class ImageError(ValueError):
    """An image that is not accepted; ``code`` is stable, the message names what was received and what is allowed."""

    def __init__(self, code: ImageErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ImageErrorCode = code


@dataclass(frozen=True)
class ImageLimits:
    """What a single image may cost."""

    max_bytes: int = 20 * 1024 * 1024
    """Encoded size."""
    max_pixels: int = 64_000_000
    """Width times height as stated in the header, checked before pixels are decoded (4 bytes each, some copies)."""


DEFAULT_LIMITS = ImageLimits()


def data_url_bytes(url: str, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
    """Bytes inside ``data:image/...;base64,...``.

    Raises:
        ImageError: not such a URL (``image_source_unsupported``), not base64, or more bytes than allowed.
    """
    head = _DATA_URL.match(url)
    if head is None:
        shown = url[:40] + ("..." if len(url) > 40 else "")
        raise ImageError(
            "image_source_unsupported",
            f"image source {shown!r}; allowed: a data URL that starts with 'data:image/<type>;base64,'",
        )
    if (len(url) - head.end()) // 4 * 3 > limits.max_bytes + 3:
        raise _too_many_bytes((len(url) - head.end()) // 4 * 3, limits)
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: characters outside ASCII
        raise ImageError("image_not_base64", f"the data URL's content is not base64: {error}") from error
    if len(data) > limits.max_bytes:
        raise _too_many_bytes(len(data), limits)
    return data


def load_image(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """Decode one still picture, completely. An EXIF orientation is left alone: pixels and size are the stored ones.

    Raises:
        ImageError: too large, not a supported format, animated, truncated or otherwise damaged.
    """
    image = _open(data, limits)
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as error:
        raise _undecodable(error) from error
    return image


def image_size(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> tuple[int, int]:
    """Stored (width, height) from the header, pixels not decoded; raises ImageError as :func:`load_image` does."""
    return _open(data, limits).size


def _open(data: bytes, limits: ImageLimits) -> Image.Image:
    """Read the header and apply every limit."""
    if len(data) > limits.max_bytes:
        raise _too_many_bytes(len(data), limits)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        animated = image.format in _ANIMATED and getattr(image, "is_animated", False)
    except UnidentifiedImageError as error:
        raise ImageError(
            "image_format_unsupported",
            f"{len(data)} bytes that are no picture in a known format; allowed: {', '.join(FORMATS)}",
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError("image_too_many_pixels", f"{error}; allowed: {limits.max_pixels} pixels") from error
    except Exception as error:  # decoders raise many kinds for damaged headers
        raise _undecodable(error) from error
    if width * height > limits.max_pixels:
        raise ImageError(
            "image_too_many_pixels",
            f"an image of {width}x{height} pixels; allowed: {limits.max_pixels} in all. Send a smaller one",
        )
    if animated:
        raise ImageError("image_animated", f"a {image.format} with several frames; allowed: a still picture")
    return image


def _too_many_bytes(size: int, limits: ImageLimits) -> ImageError:
    return ImageError("image_too_many_bytes", f"an image of {size} bytes; allowed: {limits.max_bytes}")


def _undecodable(error: Exception) -> ImageError:
    return ImageError("image_undecodable", f"the image is truncated or damaged: {error or type(error).__name__}")
