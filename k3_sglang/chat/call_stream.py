"""One tool call, written as events and JSON while the model writes its argument elements."""

import json
from typing import Any, NoReturn

from k3_sglang.chat.events import CallArgumentsDelta, CallEnd, CallStart, Event, ParsedCall
from k3_sglang.chat.json_types import MAX_NESTING, is_object, nested_beyond


class CallStream:
    """Turns the argument elements of a call into the text of one JSON object, piece by piece.

    String values stream as they come. Other values are held until complete and then written as the model
    spelled them if that is strict JSON, else as a JSON string of the same text. The pieces concatenate to the
    final arguments, which are a valid JSON object without duplicate keys even when the call was cut.
    Events go to the end of `events`.
    """

    def __init__(self, index: int, call_id: str, name: str, events: list[Event]) -> None:
        self.index = index
        self.broken = False
        self._id = call_id
        self._name = name
        self._events = events
        self._pieces: list[str] = []
        self._keys: set[str] = set()
        self._key: str | None = None  # of the value being read
        self._held: list[str] | None = None  # its text, unless it streams
        self._opaque = False  # the value being read, or read, stands for all arguments
        self._whole = "{}"  # all arguments, if none was written piece by piece; written only when the call ends
        events.append(CallStart(index, call_id, name))

    def begin(self, key: str, kind: str) -> bool:
        """Start an argument. False for a repeated key: the first value counts, this one is skipped."""
        self._abandon_value()
        self.broken |= self._opaque
        if key in self._keys or self._opaque:
            return self._opaque
        self._keys.add(key)
        self._key = key
        if kind == "string":
            self._held = None
            self._emit(self._prefix(key) + '"')
        else:
            self._held = []
        return True

    def begin_opaque(self) -> None:
        """Start a `json` element: its text is the whole arguments object."""
        self._abandon_value()
        self.broken |= bool(self._keys) or self._opaque
        if not self.broken:
            self._opaque, self._key, self._held = True, "", []

    def value(self, text: str) -> None:
        """More text of the value being read."""
        if self._key is None:
            return
        if self._held is not None:
            self._held.append(text)
        else:
            self._emit(quoted(text)[1:-1])

    def end_value(self) -> bool:
        """End the value. False if it was not the JSON it should have been."""
        key, held = self._key, self._held
        self._key, self._held = None, None
        if key is None:
            return True
        if held is None:
            self._emit('"')
            return True
        text = "".join(held)
        written = strict_json(text)
        if self._opaque:
            if written is None or not is_object(json.loads(written)):
                self.broken = True
                return False
            self._whole = written
            return True
        self._emit(self._prefix(key) + (quoted(text) if written is None else written))
        return written is not None

    def cut_value(self) -> None:
        """Mark the call broken; a string being read keeps what it has, any other value is dropped."""
        self.broken = True
        self._abandon_value()

    def finish(self, *, complete: bool) -> ParsedCall:
        """End the call; it is complete only if it was closed and nothing in it broke."""
        if self._key is not None:
            self.cut_value()
        # Last of all, so that the pieces of a call that is cut never add up to valid JSON.
        self._emit("}" if self._pieces else self._whole)
        complete = complete and not self.broken
        arguments = "".join(self._pieces)
        self._events.append(CallEnd(self.index, arguments, complete))
        return ParsedCall(self._id, self._name, arguments, complete)

    def unfinished(self) -> ParsedCall:
        """The call as it counts while it is being read."""
        return ParsedCall(self._id, self._name, "{}", False)

    def _abandon_value(self) -> None:
        if self._key is None:
            return
        self.broken = True
        if self._held is None:
            self._emit('"')
        self._key, self._held = None, None

    def _prefix(self, key: str) -> str:
        return f"{', ' if self._pieces else '{'}{quoted(key)}: "

    def _emit(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._events.append(CallArgumentsDelta(self.index, piece))


def quoted(text: str) -> str:
    """Text as a JSON string; escaping is per character, so it can be done piece by piece."""
    return json.dumps(text, ensure_ascii=False)


def strict_json(text: str) -> str | None:
    """The text if it is JSON (no NaN, no Infinity), rewritten only to drop duplicate keys; else None."""
    duplicates = False

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal duplicates
        value = dict(pairs)
        duplicates |= len(value) != len(pairs)
        return value

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(text, object_pairs_hook=build, parse_constant=no_constant)
        if nested_beyond(value, MAX_NESTING):
            return None
        # Escaped: a value may spell half of a surrogate pair, which has no UTF-8 form.
        return json.dumps(value, allow_nan=False) if duplicates else text
    except (ValueError, RecursionError):  # also integers too long to convert and nesting too deep
        return None
