"""Markers and text to tags: reads tag headers and settles tags with a missing separator."""

import re
from typing import Protocol

from k3_sglang.chat.lexer import Marker

CHANNELS = frozenset(("think", "response", "tools"))
ELEMENTS = frozenset((*CHANNELS, "call", "argument", "json", "message"))

_LONGEST_ELEMENT = max(map(len, ELEMENTS))
MAX_KEY_CHARS = 1024
"""Longest argument key that a request may declare; a tag holds it however many of its characters need escaping."""

# An undeclared key may be as long as fits here. A grammar that counted its characters would take the engine seconds.
_MAX_HEADER_CHARS = 16_384
_HEADER = re.compile(r'([a-z_]+)((?:\s+[A-Za-z_]+="[^"]*")*)\s*')
_ATTRIBUTE = re.compile(r'([A-Za-z_]+)="([^"]*)"')


class TagHandler(Protocol):
    """What a `TagReader` reports to."""

    @property
    def open_element(self) -> str:
        """Name of the innermost open element, "" if it has none."""
        ...

    def on_data(self, text: str) -> None:
        """Text outside of tags."""
        ...

    def on_open(self, name: str, attributes: dict[str, str]) -> None:
        """A known element begins; attribute values are unescaped."""
        ...

    def on_close(self, name: str) -> None:
        """A known element ends."""
        ...

    def on_bad_tag(self, *, is_element: bool) -> None:
        """A tag that cannot be read; `is_element` if it opens something whose content must not be trusted."""
        ...

    def on_end(self, marker: Marker) -> None:
        """`<|end_of_msg|>` or a control token that no turn contains."""
        ...

    def warn(self, code: str) -> None:
        """An irregularity that was repaired."""
        ...


class TagReader:
    """Collects the text after an open or close marker until it is clear which tag it is."""

    def __init__(self, handler: TagHandler) -> None:
        self._handler = handler
        self._header: list[str] | None = None
        self._header_chars = 0
        self._opening = True

    def on_text(self, text: str) -> None:
        """Take text: into the tag being read, the rest to the handler."""
        if self._header is not None:
            text = self._extend_header(self._header, text)
        if text:
            self._handler.on_data(text)

    def on_marker(self, marker: Marker) -> None:
        """Take a marker; it ends the tag being read, whether or not it is the separator."""
        was_reading = self._header is not None
        if was_reading:
            self._finish_header(whole=marker is Marker.SEP)
        match marker:
            case Marker.OPEN | Marker.CLOSE:
                self._header, self._header_chars = [], 0
                self._opening = marker is Marker.OPEN
            case Marker.SEP:
                if not was_reading:
                    self._handler.warn("stray_marker")
            case Marker.END | Marker.OTHER:
                self._handler.on_end(marker)

    def drop(self) -> None:
        """Forget a tag that was cut before it was complete."""
        self._header = None

    def _extend_header(self, header: list[str], text: str) -> str:
        """Add to the header; returns the text that turned out not to belong to it.

        A close tag is a bare name, so it is settled as soon as the text stops being one. An open tag may hold
        long attribute values and is given up only at the size limit.
        """
        limit = _MAX_HEADER_CHARS if self._opening else _LONGEST_ELEMENT + 1
        taken = text[: limit - self._header_chars]
        rest = text[len(taken) :]
        header.append(taken)
        self._header_chars += len(taken)
        if not self._opening:
            return self._settle_close("".join(header), rest)
        if self._header_chars < limit:
            return ""
        self._header = None
        self._handler.warn("stray_marker")
        return "".join(header) + rest

    def _settle_close(self, header: str, rest: str) -> str:
        """If the header can no longer be a name: what follows the open element's name is text after it."""
        if any(element.startswith(header) for element in ELEMENTS):
            return rest
        self._header = None
        name = self._handler.open_element
        if name and header.startswith(name):
            self._handler.warn("separator_missing")
            self._handler.on_close(name)
            return header[len(name) :] + rest
        self._handler.warn("stray_marker")
        return header + rest

    def _finish_header(self, *, whole: bool) -> None:
        header = "".join(self._header or ())
        self._header = None
        if self._opening:
            self._finish_open(header, whole=whole)
        elif header not in ELEMENTS:
            self._handler.warn("stray_marker")
        else:
            if not whole:
                self._handler.warn("separator_missing")
            self._handler.on_close(header)

    def _finish_open(self, header: str, *, whole: bool) -> None:
        """Without its separator only a bare channel name is accepted; attributes may have been cut."""
        name, attributes = parse_header(header)
        if not whole and header in CHANNELS:
            self._handler.warn("separator_missing")
        elif not whole and not name:
            self._handler.warn("stray_marker")
            if header:
                self._handler.on_data(header)
            return
        elif not whole or name not in ELEMENTS:
            self._handler.on_bad_tag(is_element=whole)
            return
        self._handler.on_open(name, attributes)


def parse_header(header: str) -> tuple[str, dict[str, str]]:
    """A tag's name and attributes, values unescaped; name "" if the header is not of that form.

    The first of repeated attributes counts. Values are escaped as K3 does: only `&` and `"`.
    """
    match = _HEADER.fullmatch(header)
    if match is None:
        return "", {}
    found = reversed(_ATTRIBUTE.findall(match.group(2)))
    return match.group(1), {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in found}
