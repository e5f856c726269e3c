"""A prompt with one placeholder per picture to the prompt the engine computes: one placeholder per feature row."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from k3_sglang.vision.geometry import grid_tokens, image_tokens
from k3_sglang.vision.images import DEFAULT_LIMITS, ImageError, ImageLimits, data_url_bytes, image_size, load_image
from k3_sglang.vision.preprocess import Patches, preprocess
from k3_sglang.vision.support import ImageSupport

Source = str | bytes
"""A picture as it was sent: a data URL, bare base64, or its bytes. Nothing is fetched."""

_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")


@dataclass(frozen=True)
class PlacedImage:
    """One picture of a prompt."""

    patches: Patches
    first: int
    """Position of its first row in the expanded prompt."""
    rows: int
    """Feature rows, at consecutive positions."""
    identity: bytes
    """SHA-256 of grid and pixels: equal pictures share prefixes and features, different ones never do."""


@dataclass(frozen=True)
class ExpandedPrompt:
    """What the engine computes."""

    ids: list[int]
    """Token ids, the placeholder repeated once per feature row."""
    images: list[PlacedImage]


def expand(
    ids: Sequence[int],
    sources: Sequence[object],
    support: ImageSupport,
    max_len: int | None = None,
    limits: ImageLimits = DEFAULT_LIMITS,
) -> ExpandedPrompt:
    """Decode the pictures of a prompt and put each in the place of its placeholder, in order.

    Args:
        ids: token ids with exactly one ``support.placeholder_id`` per picture.
        sources: :data:`Source` values, one per placeholder.
        max_len: tokens the expanded prompt may have; looked at before a picture is decoded.

    Raises:
        ValueError: the number of pictures is not that of placeholders, a picture is not accepted, or the prompt would
            be too long. The message names the picture by its index and holds the code of an :class:`ImageError`.
    """
    places = list(ids).count(support.placeholder_id)
    if places != len(sources):
        raise ValueError(
            f"the prompt has {places} image placeholder(s) (token {support.placeholder_id}), but image_data has "
            f"{len(sources)} image(s); give exactly one placeholder per image, it is expanded here"
        )
    encoded: list[bytes] = []
    rows = 0
    for index, source in enumerate(sources):
        with _naming(index):
            encoded.append(encoded_bytes(source, limits))
            rows += image_tokens(*image_size(encoded[-1], limits), support.media)
    length = len(ids) - places + rows
    if max_len is not None and length > max_len:
        raise ValueError(f"the prompt has {length} tokens, {rows} of them for images; allowed: {max_len}")
    return _place(ids, encoded, support, limits)


def encoded_bytes(source: object, limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
    """The encoded picture that a source holds.

    Raises:
        ImageError: not a :data:`Source`, not base64, or more bytes than allowed.
    """
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str):
        raise ImageError("image_source_unsupported", f"image source of type {type(source).__name__}; {_ALLOWED}")
    if source[:5].lower() == "data:":
        return data_url_bytes(source, limits)
    if "://" in source[:40] or not _BASE64.fullmatch(source):
        shown = source[:40] + ("..." if len(source) > 40 else "")
        raise ImageError("image_source_unsupported", f"image source {shown!r}; {_ALLOWED}")
    if (size := len(source) // 4 * 3) > limits.max_bytes + 3:
        raise ImageError("image_too_many_bytes", f"an image of {size} bytes; allowed: {limits.max_bytes}")
    try:
        return base64.b64decode(source, validate=True)
    except binascii.Error as error:
        raise ImageError("image_not_base64", f"the image is not base64: {error}") from error


_ALLOWED = "allowed: a data URL or base64; the engine reads no files and fetches nothing"


def _place(ids: Sequence[int], encoded: Sequence[bytes], support: ImageSupport, limits: ImageLimits) -> ExpandedPrompt:
    pictures = _decoded(encoded, support, limits)
    expanded: list[int] = []
    images: list[PlacedImage] = []
    for token in ids:
        if token != support.placeholder_id:
            expanded.append(token)
            continue
        patches = next(pictures)
        rows = grid_tokens(patches.grid)
        images.append(PlacedImage(patches, len(expanded), rows, _identity(patches)))
        expanded += [token] * rows
    return ExpandedPrompt(expanded, images)


def _decoded(encoded: Sequence[bytes], support: ImageSupport, limits: ImageLimits) -> Iterator[Patches]:
    """One picture after the other, so that a request holds one decoded picture at a time."""
    for index, data in enumerate(encoded):
        with _naming(index):
            patches = preprocess(load_image(data, limits), support.media)
        yield patches


@contextlib.contextmanager
def _naming(index: int) -> Generator[None]:
    """Say which picture an error is about."""
    try:
        yield
    except ImageError as error:
        raise ValueError(f"image_data[{index}]: {error.code}: {error}") from error
    except ValueError as error:
        raise ValueError(f"image_data[{index}]: {error}") from error


def _identity(patches: Patches) -> bytes:
    digest = hashlib.sha256(repr(patches.grid).encode())
    digest.update(patches.pixels.data)
    return digest.digest()
