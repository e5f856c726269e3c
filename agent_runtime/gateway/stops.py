"""Finds stop strings in visible text that arrives in pieces."""

from collections.abc import Sequence


class StopFinder:
    """Passes text through up to the first stop string; holds back what may still become one.

    Only text of one channel may be fed, so that a stop string never matches across a structural token.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Text that is safe to show. Sets ``found`` and drops the rest when a stop string is complete."""
        if not self._stops or self.found is not None:
            return "" if self.found is not None else text
        window = self._held + text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := window.find(stop)) >= 0]
        if hits:
            # The match complete first wins, whatever the pieces; of those that end together the longest.
            _, at, self.found = min(hits)
            self._held = ""
            return window[:at]
        held_len = max(_begun_len(window, stop) for stop in self._stops)
        self._held = window[len(window) - held_len :]
        return window[: len(window) - held_len]

    def finish(self) -> str:
        """The held-back text: no more comes, so it is no stop string."""
        held, self._held = self._held, ""
        return held


def _begun_len(text: str, stop: str) -> int:
    """Length of the longest proper beginning of ``stop`` that ``text`` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
