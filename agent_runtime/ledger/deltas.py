"""Compact storage of what grows: only what is new beyond the last of its kind, compressed."""

import sys
import zlib
from array import array
from collections.abc import Iterable
from typing import NamedTuple

ID_BYTES = 4


class Delta(NamedTuple):
    """Bytes as a change to others: ``head_bytes`` and ``tail_bytes`` are as there, ``middle`` (compressed) is new."""

    head_bytes: int
    tail_bytes: int
    middle: bytes


def delta(base: bytes, value: bytes) -> Delta:
    """What turns ``base`` into ``value``."""
    head = common_prefix_len(base, value)
    room = min(len(base), len(value)) - head
    tail = common_prefix_len(base[len(base) - room :][::-1], value[len(value) - room :][::-1]) if room else 0
    return Delta(head, tail, zlib.compress(value[head : len(value) - tail]))


def restored(base: bytes, change: Delta) -> bytes:
    """The value of which ``change`` is the delta to ``base``.

    Raises:
        ValueError: the base is shorter than the delta says, or its new part is damaged.
    """
    if change.head_bytes + change.tail_bytes > len(base):
        raise ValueError(f"a delta keeps {change.head_bytes}+{change.tail_bytes} bytes of {len(base)}")
    try:
        middle = zlib.decompress(change.middle)
    except zlib.error as error:
        raise ValueError(f"damaged delta: {error}") from error
    return base[: change.head_bytes] + middle + base[len(base) - change.tail_bytes :]


def common_prefix_len(first: bytes, second: bytes) -> int:
    """Bytes that two values begin with in common; compares blocks, not bytes."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def packed(ids: Iterable[int]) -> bytes:
    """Ids as little-endian uint32."""
    numbers = array("I", ids)
    assert numbers.itemsize == ID_BYTES
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpacked(data: bytes) -> "array[int]":
    """Ids from little-endian uint32. Raises ValueError for a length that is no multiple of 4."""
    numbers = array("I")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
