"""Output ids or text to text runs and markers, however the output arrives in pieces."""

import codecs
import re
from collections.abc import Callable, Sequence
from enum import Enum

from k3_sglang.chat.tokenizer import K3Tokenizer


class Marker(Enum):
    """Structure inside a model's output; `OTHER` is any control token the protocol has no place for."""

    OPEN = "<|open|>"
    CLOSE = "<|close|>"
    SEP = "<|sep|>"
    END = "<|end_of_msg|>"
    OTHER = "other"


OnText = Callable[[str], None]
OnMarker = Callable[[Marker], None]


class TokenLexer:
    """Splits ids: control tokens are markers, everything else is text, whatever it spells."""

    def __init__(self, tokenizer: K3Tokenizer, on_text: OnText, on_marker: OnMarker) -> None:
        special = tokenizer.special
        self._markers = {
            special.open: Marker.OPEN,
            special.close: Marker.CLOSE,
            special.sep: Marker.SEP,
            special.end_of_msg: Marker.END,
        }
        self._tokenizer = tokenizer
        self._base = tokenizer.base_tokens
        self._on_text = on_text
        self._on_marker = on_marker
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Sequence[int]) -> None:
        """Report what is certain after these ids; raises ValueError on an id outside the vocabulary."""
        start = 0
        base = self._base
        for position, token in enumerate(ids):
            if token >= base:
                self._text(ids[start:position], final=True)
                if not self._tokenizer.is_special(token):
                    raise ValueError(
                        f"token id {token} is outside the vocabulary (0 to {self._tokenizer.vocab_size - 1})"
                    )
                self._on_marker(self._markers.get(token, Marker.OTHER))
                start = position + 1
        self._text(ids[start:], final=False)

    def finish(self) -> None:
        """Report what was held back."""
        self._text((), final=True)

    def _text(self, ids: Sequence[int], *, final: bool) -> None:
        text = self._utf8.decode(self._tokenizer.decode_bytes(ids), final)
        if final:
            self._utf8.reset()
        if text:
            self._on_text(text)


class TextLexer:
    """Splits text for engines that return no ids: the four marker spellings are structure.

    Text cannot tell a marker from its spelling; use ids where they are to be had.
    """

    _MARKERS = re.compile(r"<\|(?:open|close|sep|end_of_msg)\|>")
    _LONGEST = max(len(marker.value) for marker in Marker)

    def __init__(self, on_text: OnText, on_marker: OnMarker) -> None:
        self._on_text = on_text
        self._on_marker = on_marker
        self._held = ""

    def feed(self, text: str) -> None:
        """Report what is certain after this text; a possible beginning of a marker is held back."""
        text = self._held + text
        start = 0
        for match in self._MARKERS.finditer(text):
            if match.start() > start:
                self._on_text(text[start : match.start()])
            self._on_marker(Marker(match.group()))
            start = match.end()
        keep = self._partial_marker(text, start)
        if keep > start:
            self._on_text(text[start:keep])
        self._held = text[keep:]

    def finish(self) -> None:
        """Report what was held back; an unfinished marker is not text and is dropped."""
        held, self._held = self._held, ""
        if held == "<":  # a lone angle bracket is far more often text than a cut marker
            self._on_text(held)

    def _partial_marker(self, text: str, start: int) -> int:
        """Where the trailing text begins that may yet become a marker; len(text) if nowhere."""
        for position in range(max(start, len(text) - self._LONGEST + 1), len(text)):
            tail = text[position:]
            if any(marker.value.startswith(tail) for marker in Marker if marker is not Marker.OTHER):
                return position
        return len(text)
