"""Safetensors files that consist of a header: their tensors are a hole in the file, whatever their size."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

BF16_BYTES = 2


def write_header_only(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    """Write a file of two-byte tensors with these names and shapes, all of them zero."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + BF16_BYTES * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + end)
