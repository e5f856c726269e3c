"""Ids of parts of prompts, by what the parts say, so that a history is not tokenised again with every turn."""

from collections.abc import Hashable, Iterable, Sequence
from sys import getsizeof
from threading import Lock
from typing import cast

from k3_sglang.chat.types import ToolCall

DEFAULT_MAX_TOKENS = 4_000_000
_ENTRY_TOKENS = 64
_ID_BYTES = 8


class _Entry:
    """Ids of one part, and the number of the look-up that used it last."""

    __slots__ = ("cost", "ids", "used")

    def __init__(self, ids: tuple[int, ...], used: int, cost: int) -> None:
        self.ids = ids
        self.used = used
        self.cost = cost


class EncodeCache:
    """Bounded map from a part of a prompt (a message, a tool list) to its ids; thread-safe.

    A key is all that its part's ids depend on, compared by value: equal keys mean equal ids. When the bound is
    reached, the parts unused for longest go, a quarter of all. An id costs 8 bytes, a key its texts, of which 8 bytes
    count as a token (what a key says need not be in the prompt: an id of a call is not), an entry 64 tokens more: at
    most about 60 MB for 4,000,000 tokens. A part larger than a quarter of the bound is not kept.
    """

    def __init__(self, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1")
        self._max_tokens = max_tokens
        self._parts: dict[Hashable, _Entry] = {}
        self._tokens = 0
        self._lookups = 0
        self._numbers: dict[int, int] = {}
        self._lock = Lock()

    def find(self, keys: Iterable[Hashable | None]) -> list[tuple[int, ...] | None]:
        """Ids of each part, None where the key is None or the part is not known. Counts as a use."""
        known = self._parts.get
        found: list[tuple[int, ...] | None] = []
        with self._lock:
            self._lookups += 1
            now = self._lookups
            for key in keys:
                # A key is hashed once: a history has thousands.
                entry = None if key is None else known(key)
                if entry is None:
                    found.append(None)
                else:
                    entry.used = now
                    found.append(entry.ids)
        return found

    def keep(self, key: Hashable, ids: Sequence[int]) -> Sequence[int]:
        """Remember the ids of a part. Returns them as they are kept, which later look-ups return too."""
        cost = len(ids) + _ENTRY_TOKENS + _text_bytes(key) // _ID_BYTES
        if cost * 4 > self._max_tokens:
            return ids
        with self._lock:
            if (known := self._parts.get(key)) is not None:
                return known.ids
            # Each number once in memory, however often it occurs.
            entry = _Entry(tuple(map(self._numbers.setdefault, ids, ids)), self._lookups, cost)
            if self._tokens + entry.cost > self._max_tokens:
                self._forget(self._max_tokens * 3 // 4 - entry.cost)
            self._parts[key] = entry
            self._tokens += entry.cost
            return entry.ids

    def _forget(self, left_tokens: int) -> None:
        """Drop the parts unused for longest until no more than this is kept."""
        for key, entry in sorted(self._parts.items(), key=lambda item: item[1].used):
            if self._tokens <= left_tokens:
                break
            del self._parts[key]
            self._tokens -= entry.cost

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def tokens(self) -> int:
        """What is kept now, in tokens, those that entries and keys count for included."""
        return self._tokens


def _text_bytes(key: Hashable) -> int:
    """Bytes of all texts in a key made of tuples, texts and tool calls."""
    if isinstance(key, str):
        return getsizeof(key)
    if isinstance(key, ToolCall):
        return sum(map(getsizeof, (key.id, key.name, key.arguments)))
    return sum(map(_text_bytes, cast("tuple[Hashable, ...]", key))) if isinstance(key, tuple) else 0
