"""Keys of the tree whose rest is a position, not a copy: inserting a long prompt no longer copies it at every node.

SGLang's Python tree walks an insertion by slicing what is left of the key after each node: on a path of a hundred
nodes, a prompt of a million tokens is copied fifty times over. A :class:`Rest` is such a slice without the copy, as
long as the nodes' own keys are :class:`NodeKey`; with any other key it behaves as the slice itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from k3_sglang.compat import RadixKey


class NodeKey(RadixKey):
    """The key of a tree node, an array of its own."""

    __slots__ = ()

    @classmethod
    def of(cls, key: Any) -> NodeKey:
        """The same tokens in the same namespace."""
        return cls(key.raw_token_ids(), key.extra_key, cache_salt=key.cache_salt)

    def match(self, other: Any, page_size: int = 1) -> int:
        """Length of the common beginning, in whole pages."""
        if isinstance(other, Rest):
            return self.match_at(other.whole, other.start, page_size)
        return super().match(other, page_size)

    def __getitem__(self, index: int | slice) -> NodeKey:
        return NodeKey.of(super().__getitem__(index))


class Rest(RadixKey):
    """A key from a position on, over the tokens of the whole key."""

    __slots__ = ("start", "whole")

    def __init__(self, whole: Any, start: int = 0) -> None:
        """``whole`` is a plain key, not of bigrams; ``start`` at most its length."""
        self.whole, self.start = whole, start
        self.extra_key, self.cache_salt = whole.extra_key, whole.cache_salt
        self.is_bigram, self.limit = False, None

    @property
    def token_ids(self) -> array[int]:
        """A copy, for whoever needs the tokens themselves."""
        return self.whole.raw_token_ids()[self.start :]

    def _raw_len(self) -> int:
        return self.whole._raw_len() - self.start

    def page_aligned(self, page_size: int) -> Rest:
        """Without the last partial page."""
        length = len(self) // page_size * page_size
        return self if length == len(self) else Rest(self.whole[: self.start + length], self.start)

    def child_key_at(self, offset: int, page_size: int = 1) -> Any:
        """What the tree looks up for the page at ``offset``."""
        return self.whole.child_key_at(self.start + offset, page_size)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice) and index.stop is None and index.step is None and (index.start or 0) >= 0:
            return Rest(self.whole, self.start + min(index.start or 0, len(self)))
        return super().__getitem__(index)


def insert_without_copies(insert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Around ``UnifiedRadixCache.insert``, for a tree on which :class:`NodeKey` is kept up."""

    def inserting(params: Any) -> Any:
        key = params.key
        if key is None or key.is_bigram:
            return insert(params)
        params.key = Rest(key)
        try:
            return insert(params)
        finally:
            params.key = key

    return inserting
