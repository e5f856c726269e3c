"""Why a hit was not longer: remembers what is no longer in the tree, as far as that is cheap and bounded."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Any

from k3_sglang.cache.types import Limit

MOST_PLACES = 8192
"""Nodes below which something is remembered, and nodes whose state was dropped."""
MOST_PER_PLACE = 64
FINGERPRINT_TOKENS = 32
"""Of a text that is gone, its beginning is remembered."""


class Misses:
    """What ended before: by node of the tree, the beginnings of texts that once followed it and the reason."""

    def __init__(self) -> None:
        self._gone: OrderedDict[int, list[tuple[array[int], Limit]]] = OrderedDict()
        self._stateless: OrderedDict[int, None] = OrderedDict()

    def clear(self) -> None:
        """The tree is a new one."""
        self._gone.clear()
        self._stateless.clear()

    def text_gone(self, node_id: int, tokens: array[int], reason: Limit) -> None:
        """A text that followed a node is not in the tree any more, or never got in.

        Args:
            tokens: the text from the end of the node on; its beginning is enough.
        """
        beginning = tokens[:FINGERPRINT_TOKENS]
        known = self._gone.setdefault(node_id, [])
        known[:] = [(text, why) for text, why in known if text != beginning][-(MOST_PER_PLACE - 1) :]
        known.append((beginning, reason))
        self._gone.move_to_end(node_id)
        if len(self._gone) > MOST_PLACES:
            self._gone.popitem(last=False)

    def state_dropped(self, node_id: int) -> None:
        """A node keeps its KV and loses its state."""
        self._stateless[node_id] = None
        if len(self._stateless) > MOST_PLACES:
            self._stateless.popitem(last=False)

    def state_made(self, node_id: int) -> None:
        """A node has a state again."""
        self._stateless.pop(node_id, None)

    def node_removed(self, node_id: int) -> None:
        """A node is no more."""
        self._gone.pop(node_id, None)
        self._stateless.pop(node_id, None)

    def limit(self, node: Any, key: Any, cached: int, with_kv: int, page_size: int) -> Limit:
        """Why a match ended.

        Args:
            node: the deepest node with a state on the path. key: the prompt as the tree's key.
            cached: tokens up to that node. with_kv: tokens up to where KV goes on the path.
        """
        if cached >= len(key) // page_size * page_size:
            return Limit.WHOLE if cached == len(key) else Limit.BOUNDARY
        if with_kv > cached:
            return Limit.EVICTED if self._lost_a_state(node, key, cached, with_kv, page_size) else Limit.NO_STATE
        following = key.token_ids[cached : min(len(key), cached + FINGERPRINT_TOKENS)]
        for text, reason in self._gone.get(node.id, ()):
            if text == following[: len(text)] or following == text[: len(following)]:
                return reason
        return Limit.NO_KV

    def _lost_a_state(self, node: Any, key: Any, at: int, end: int, page_size: int) -> bool:
        while at < end:
            node = node.children.get(key.child_key_at(at, page_size))
            if node is None:
                return False
            if node.id in self._stateless:
                return True
            at += len(node.key)
        return False
