"""Remembers in little space which digests have been forgotten: never misses one, rarely names one that was not."""

import struct

_BITS = 1 << 24
_MAX_DIGESTS = 1_500_000
"""Per generation: then about one look-up in a hundred is wrong."""


class ForgottenDigests:
    """A Bloom filter of digests in two generations of 2 MiB; the older one goes when the newer is full.

    Digests are hashes already, so their own bytes are the places of their bits.
    """

    def __init__(self) -> None:
        self._new, self._old = bytearray(_BITS // 8), bytearray(_BITS // 8)
        self._digests = 0

    def add(self, digest: bytes) -> None:
        """Remember a digest of 16 bytes."""
        if self._digests >= _MAX_DIGESTS:
            self._new, self._old = bytearray(_BITS // 8), self._new
            self._digests = 0
        self._digests += 1
        for bit in _bits(digest):
            self._new[bit >> 3] |= 1 << (bit & 7)

    def __contains__(self, digest: bytes) -> bool:
        bits = _bits(digest)
        return any(all(part[bit >> 3] >> (bit & 7) & 1 for bit in bits) for part in (self._new, self._old))


def _bits(digest: bytes) -> tuple[int, ...]:
    return tuple(word % _BITS for word in struct.unpack("<4I", digest))
