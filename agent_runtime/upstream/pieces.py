"""Text that arrives in pieces: halves of characters put together, thinking found between tags."""

OPEN, CLOSE = "<think>", "</think>"


class WholeCharacters:
    """Passes text through; a piece that ends in the middle of a character waits for its other half.

    Servers that count in UTF-16 cut an astral character in two. Half a pair that stays alone has no UTF-8 form and
    becomes U+FFFD.
    """

    def __init__(self) -> None:
        self._half = ""

    def feed(self, piece: str) -> str:
        """The text that is whole."""
        if not self._half and piece.isascii():
            return piece
        text, self._half = self._half + piece, ""
        if text and "\ud800" <= text[-1] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return _paired(text)

    def finish(self) -> str:
        """What waited in vain."""
        text, self._half = _paired(self._half), ""
        return text


def _paired(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class ThinkTags:
    """Splits content that begins with ``<think>`` into thinking, up to ``</think>``, and what follows."""

    def __init__(self, *, enabled: bool) -> None:
        self._held = ""
        self._state = "start" if enabled else "content"

    def feed(self, piece: str) -> tuple[str, str]:
        """New thinking and new content."""
        if self._state == "content":
            return "", piece
        self._held += piece
        if self._state == "start":
            if len(self._held) < len(OPEN) and OPEN.startswith(self._held):
                return "", ""
            if not self._held.startswith(OPEN):
                return "", self._all("content")
            self._held, self._state = self._held[len(OPEN) :], "think"
        thought, tag, rest = self._held.partition(CLOSE)
        if tag:
            self._held, self._state = "", "content"
            return thought, rest.lstrip("\n")
        kept = next(length for length in range(len(CLOSE) - 1, -1, -1) if self._held.endswith(CLOSE[:length]))
        thought, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return thought, ""

    def finish(self) -> tuple[str, str]:
        """What was held back: it became no tag."""
        return (self._all("content"), "") if self._state == "think" else ("", self._all("content"))

    def _all(self, state: str) -> str:
        text, self._held, self._state = self._held, "", state
        return text
