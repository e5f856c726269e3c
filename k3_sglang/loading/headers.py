"""What the files of a checkpoint say they hold, read from their headers alone and compared with what has to be there.

A safetensors file starts with the length of a JSON header (8 bytes, little endian) and that header: name, dtype, shape
and place of every tensor. Reading the headers of the release takes seconds, reading its tensors an hour.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_sglang.config import ConfigError, K3Config
from k3_sglang.loading.inventory import PROJECTOR_PREFIX, TOWER_PREFIX, Specs, expected_tensors, expected_text_tensors

INDEX_FILE = "model.safetensors.index.json"
"""Which tensor lies in which file of a checkpoint."""

MAX_HEADER_BYTES = 1 << 30
SHOWN = 3
"""Tensors of one kind of mistake that a message names."""


class HeaderError(ValueError):
    """A file that is not whole, or no safetensors file; the message names it and what to do."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file's header describes it."""

    shape: tuple[int, ...]
    dtype: str
    """Safetensors' name of it."""
    size_bytes: int
    file: str


def checkpoint_problems(directory: Path, *, images: bool) -> list[str]:
    """Everything about a checkpoint's tensors that would make loading it fail, one line each; nothing is loaded.

    Args:
        images: whether the image tower is loaded too; its tensors are not looked at otherwise.
    """
    try:
        config, found = K3Config.from_dir(directory), read_headers(directory)
        if images:
            return compare(found, expected_tensors(config), directory)
        text = {name: tensor for name, tensor in found.items() if not name.startswith((TOWER_PREFIX, PROJECTOR_PREFIX))}
        return compare(text, expected_text_tensors(config.text), directory)
    except (ConfigError, HeaderError) as error:
        return [str(error)]


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """Tensors of all files of a checkpoint.

    Raises:
        HeaderError: a file is missing, cut off or damaged, or a tensor is in two files.
    """
    found: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        for name, tensor in read_header(path).items():
            if name in found:
                raise HeaderError(f"{directory}: tensor {name!r} is in {found[name].file} and in {tensor.file}")
            found[name] = tensor
    return found


def weight_files(directory: Path) -> list[Path]:
    """The files the index names, in order; every safetensors file where there is no index.

    Raises:
        HeaderError: the index cannot be read, or a file is not there.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise HeaderError(f"{directory} holds no *.safetensors files; the download is not complete")
        return paths
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (directory / name).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HeaderError(
            f"{index} cannot be read ({error!r}); it must be JSON with a weight_map: download it again"
        ) from error
    if missing:
        raise HeaderError(f"{directory} lacks {_listed(missing)}; the download is not complete")
    return [directory / name for name in names]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file.

    Raises:
        HeaderError: the file is shorter or longer than its header says, or has no readable header.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == len(struct.pack("<Q", 0)) else MAX_HEADER_BYTES
            if length >= min(size, MAX_HEADER_BYTES):
                raise HeaderError(f"{path} is cut off or no safetensors file ({size} bytes); download it again")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {name: _stored(entry, path.name) for name, entry in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0) + length + len(start)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        if isinstance(error, HeaderError):
            raise
        raise HeaderError(f"{path} has no readable header ({error!r}); download it again") from error
    if end != size:
        raise HeaderError(f"{path} has {size} bytes and its header describes {end}; download it again")
    return found


def _stored(entry: Mapping[str, Any], file: str) -> StoredTensor:
    first, last = entry["data_offsets"]
    return StoredTensor(tuple(int(size) for size in entry["shape"]), str(entry["dtype"]), int(last) - int(first), file)


def compare(found: Mapping[str, StoredTensor], expected: Specs, source: Path | str) -> list[str]:
    """Tensors that are missing, of no use, misshaped or of another dtype: a line for each of these that occurs."""
    missing = [f"{name} {spec.shape}" for name, spec in expected.items() if name not in found]
    extra = [f"{name} {tensor.shape} in {tensor.file}" for name, tensor in found.items() if name not in expected]
    both = [(name, found[name], spec) for name, spec in expected.items() if name in found]
    misshaped = [
        f"{name} has {tensor.shape} in {tensor.file}, config.json requires {spec.shape}"
        for name, tensor, spec in both
        if tensor.shape != spec.shape
    ]
    mistyped = [
        f"{name} is {tensor.dtype} in {tensor.file}, allowed: {', '.join(spec.dtypes)}"
        for name, tensor, spec in both
        if tensor.dtype not in spec.dtypes
    ]
    kinds: Iterable[tuple[str, Sequence[str]]] = (
        (f"of {len(expected)} tensors are missing", missing),
        ("tensor(s) have no place in the model that config.json describes", extra),
        ("tensor(s) have a wrong shape", misshaped),
        ("tensor(s) have a wrong dtype", mistyped),
    )
    return [f"{source}: {len(names)} {what}: {_listed(names)}" for what, names in kinds if names]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
