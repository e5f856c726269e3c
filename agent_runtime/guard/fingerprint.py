"""Digests of messages by meaning: what a client may respell without changing the conversation is left out."""

import hashlib
import json
from collections.abc import Hashable, Iterable
from threading import Lock
from typing import Any, cast

from k3_sglang.chat.canonical import canonical_json
from k3_sglang.chat.toolresults import NamedResult
from k3_sglang.chat.types import Content, ImagePart, JSONObject, Message, TextPart

DIGEST_BYTES = 16
START = bytes(DIGEST_BYTES)
"""Digest of the conversation before its first message."""
_EXACT_IN_FLOAT = 2**53
_MEMO_ENTRIES = 200_000


class Fingerprints:
    """Digests of messages, remembered by value: of a history that grows only what is new is hashed. Thread-safe.

    Left out, because clients change it: call ids, order and spacing of JSON, 1.0 for 1, text as one string or as
    parts, white space around a text, the ids and names that results are sent with (the call they answer counts).
    Thinking is left out too: whether it is intact is the question.
    """

    def __init__(self, max_entries: int = _MEMO_ENTRIES) -> None:
        self._memo: dict[Hashable, bytes] = {}
        self._max_entries = max_entries
        self._lock = Lock()

    def visible(self, turn: Message) -> bytes:
        """Digest of an assistant turn: its text and its calls by name and argument values."""
        content = turn.content
        if not isinstance(content, str):
            content = _content_key(content)
        # Strings and tuples only: hashing and comparing them is no call of Python code.
        key = (turn.name, content, tuple([(call.name, call.arguments) for call in turn.tool_calls]))
        known = self._memo.get(key)
        return known if known is not None else self._keep(key, _visible(turn))

    def message(self, message: Message, result: NamedResult | None) -> bytes:
        """Digest of a message that no model wrote. ``result`` is the call that a tool message answers."""
        if message.tools:
            return _digest(["tools", list(message.tools)])
        content = message.content
        if not isinstance(content, str):
            content = _content_key(content)
        key = (message.role, None if result else message.name, content, result)
        known = self._memo.get(key)
        return known if known is not None else self._keep(key, _digest(list(key)))

    def _keep(self, key: Hashable, digest: bytes) -> bytes:
        with self._lock:
            if len(self._memo) >= self._max_entries:
                for old in list(self._memo)[: self._max_entries // 2]:
                    del self._memo[old]
            self._memo[key] = digest
        return digest


def tools_digest(tools: Iterable[JSONObject]) -> bytes:
    """Digest of a set of tools, whatever their order."""
    return _digest(sorted(canonical_json(tool) for tool in tools))


def joined(*digests: bytes) -> bytes:
    """Digest of digests in order."""
    return hashlib.blake2b(b"".join(digests), digest_size=DIGEST_BYTES).digest()


def turn_text(content: Content) -> str | None:
    """The content as one string, however the client split it; None when it holds more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part.text for part in content if isinstance(part, TextPart)]
    return "".join(parts) if len(parts) == len(content) else None


def plain_arguments(arguments: str) -> Any:
    """Arguments by value: clients reorder keys, change spacing, and write 1.0 as 1."""
    try:
        return _plain(json.loads(arguments)) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments


def calls_value(turn: Message) -> list[list[Any]]:
    """The calls of a turn by name and argument values."""
    return [[call.name, plain_arguments(call.arguments)] for call in turn.tool_calls]


def _visible(turn: Message) -> bytes:
    text = turn_text(turn.content)
    content = text.strip() if text is not None else _content_key(turn.content)
    return _digest(["turn", turn.name, content, calls_value(turn)])


def _content_key(content: Content) -> Hashable:
    """The content so that it can be a key and be written as JSON: text, or texts and the digests of images."""
    if content is None or isinstance(content, str):
        return content or ""
    text = turn_text(content)
    if text is not None:
        return text
    return tuple(_image_key(part) if isinstance(part, ImagePart) else part.text for part in content)


def _image_key(part: ImagePart) -> tuple[str, ...]:
    return ("image", part.digest.hex() or part.source, repr(part.size))


def _digest(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT_IN_FLOAT:
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[str, Any]", value).items()}
    return value
