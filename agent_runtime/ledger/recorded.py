"""Remembers the exact output ids of assistant turns, so that a history sent back as text replays them."""

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any, NamedTuple, cast

from k3_sglang.chat.types import Channel, Message, TextPart

DIGEST_BYTES = 16
MAX_SPELLINGS = 4
_EXACT_IN_FLOAT = 2**53


class ContextDigest:
    """Running hash of a conversation, its ids and its images: extending it costs only what is added."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def extend(self, ids: Iterable[int], images: Iterable[bytes] = ()) -> None:
        """Append ids to the conversation, and the content digest of each image that stands at a pad among them.

        The ids of two images of one size are the same; without the digests one would be taken for the other.
        """
        self._hash.update(array("I", ids).tobytes())
        for digest in images:
            self._hash.update(digest)

    def copy(self) -> "ContextDigest":
        """A hash of the same conversation that goes its own way from here."""
        copied = ContextDigest()
        copied._hash = self._hash.copy()
        return copied

    def digest(self) -> bytes:
        """Hash of everything appended so far, ``[DIGEST_BYTES]``."""
        return self._hash.digest()


class _Spelling(NamedTuple):
    """One output that a turn was: its ids, and the call ids it was delivered with."""

    call_ids: tuple[str, ...]
    ids: "array[int]"


class RecordedTurns:
    """Map from (ids of the conversation before the turn, the turn as delivered) to the turn's output ids.

    The conversation is everything up to the assistant message, images by their content, without the generation
    prompt and without instructions for one turn only (tool choice, response format), which later prompts do not hold.
    A turn that was generated more than once keeps up to `MAX_SPELLINGS` different outputs: sessions with the same
    opening may say the same in different ids, and each goes on from its own. The turn is compared by reasoning,
    content, and the calls' names and argument values, not by call ids or JSON spelling, which clients change.
    Bounded by tokens and by turns; the turn unused for longest goes first, of one turn its oldest output. Thread-safe.
    """

    def __init__(self, max_tokens: int, max_turns: int) -> None:
        if max_tokens < 1 or max_turns < 1:
            raise ValueError(f"max_tokens={max_tokens} and max_turns={max_turns} must both be at least 1")
        self._max_tokens = max_tokens
        self._max_turns = max_turns
        self._turns: OrderedDict[bytes, list[_Spelling]] = OrderedDict()
        self._tokens = 0
        self._lock = Lock()

    def record(self, context: bytes, start: Channel, turn: Message, ids: Sequence[int]) -> None:
        """Keep ``ids``, from right after the generation prompt to the end-of-message id inclusive.

        ``start`` is the channel the generation prompt left open. A turn larger than the whole bound is not kept.
        """
        key = _key(context, start, turn)
        if key is None or not ids or len(ids) > self._max_tokens:
            return
        newest = _Spelling(_call_ids(turn), array("I", ids))
        with self._lock:
            older = [spelling for spelling in self._turns.get(key, ()) if spelling.ids != newest.ids]
            self._forget(key)
            kept = [newest, *older[: MAX_SPELLINGS - 1]]
            while _tokens(kept) > self._max_tokens:
                kept.pop()
            self._turns[key] = kept
            self._tokens += _tokens(kept)
            while self._tokens > self._max_tokens or len(self._turns) > self._max_turns:
                self._forget(next(iter(self._turns)))

    def find(self, context: bytes, start: Channel, turn: Message) -> tuple[tuple[int, ...], ...]:
        """The recorded outputs of a turn, none if it is not known. Counts as a use.

        The one delivered with the very call ids of ``turn`` comes first, then the newest.
        """
        key = _key(context, start, turn)
        if key is None:
            return ()
        with self._lock:
            spellings = self._turns.get(key)
            if spellings is None:
                return ()
            self._turns.move_to_end(key)
            wanted = _call_ids(turn)
            return tuple(tuple(s.ids) for s in sorted(spellings, key=lambda s: s.call_ids != wanted))

    @property
    def tokens(self) -> int:
        """Tokens kept now."""
        return self._tokens

    def __len__(self) -> int:
        return len(self._turns)

    def check_integrity(self) -> None:
        """Raise AssertionError when the counts and the contents disagree or a bound is exceeded."""
        with self._lock:
            tokens = sum(_tokens(spellings) for spellings in self._turns.values())
        assert tokens == self._tokens, f"tokens kept {tokens} != tokens counted {self._tokens}"
        assert tokens <= self._max_tokens, f"tokens kept {tokens} > max_tokens {self._max_tokens}"
        assert len(self._turns) <= self._max_turns, f"turns {len(self._turns)} > max_turns {self._max_turns}"

    def _forget(self, key: bytes) -> None:
        self._tokens -= _tokens(self._turns.pop(key, ()))


def _tokens(spellings: Iterable[_Spelling]) -> int:
    return sum(len(spelling.ids) for spelling in spellings)


def _call_ids(turn: Message) -> tuple[str, ...]:
    return tuple(call.id for call in turn.tool_calls)


def _key(context: bytes, start: Channel, turn: Message) -> bytes | None:
    """Hash that identifies a turn; None for what no generation can have produced (a name, an image)."""
    content = _text(turn)
    if turn.role != "assistant" or turn.name is not None or content is None:
        return None
    calls = [[call.name, _plain_arguments(call.arguments)] for call in turn.tool_calls]
    shape = json.dumps([start, turn.reasoning or "", content, calls], sort_keys=True)
    return hashlib.blake2b(context + shape.encode(), digest_size=DIGEST_BYTES).digest()


def _text(turn: Message) -> str | None:
    """The content as one string, however the client split it."""
    if turn.content is None or isinstance(turn.content, str):
        return turn.content or ""
    parts = [part.text for part in turn.content if isinstance(part, TextPart)]
    return "".join(parts) if len(parts) == len(turn.content) else None


def _plain_arguments(arguments: str) -> Any:
    """Arguments by value: clients reorder keys, change spacing, and write 1.0 as 1."""
    try:
        return _plain(json.loads(arguments)) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT_IN_FLOAT:
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[str, Any]", value).items()}
    return value
