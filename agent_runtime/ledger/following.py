"""What other writers of a shared ledger add and forget, brought into this process's memory."""

import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from threading import Lock

from agent_runtime.errors import LedgerError
from agent_runtime.ledger.reading import turns_by_number
from agent_runtime.ledger.turns import KnownTurn, TurnIndex
from agent_runtime.ledger.writers import writer_of


class Follower:
    """Reads the ledger's journal from where it ends now. ``writer`` is this process, whose own rows it leaves out.

    Thread-safe. Without news it costs one look at the file's version.

    Raises:
        LedgerError: the file cannot be read.
    """

    def __init__(self, path: Path, writer: int) -> None:
        self._path = path
        self._writer = writer
        self._lock = Lock()
        self._version = 0
        try:
            self._db = sqlite3.connect(
                f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
            )
            (last,) = self._db.execute("SELECT max(seq) FROM journal").fetchone()
        except sqlite3.Error as error:
            raise LedgerError(f"cannot follow ledger {path}: {error}") from error
        self._last: int = last or 0

    def catch_up(
        self, indexes: Mapping[str, TurnIndex], forgotten: Callable[[Collection[int]], None] | None = None
    ) -> int:
        """Bring in all that others have committed by now, each owner's turns into the index of that owner.

        ``forgotten`` is called with sessions that were deleted and have not been gone on with since. Returns how many
        turns of others came. Raises sqlite3.Error.
        """
        with self._lock:
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
            if version == self._version:
                return 0
            rows = self._db.execute(
                "SELECT seq, turn, forgot FROM journal WHERE seq > ? ORDER BY seq", (self._last,)
            ).fetchall()
            turns = self._turns(self._wanted(rows, indexes))
            for _, turn, forgot in rows:
                if turn in turns:
                    found = turns[turn]
                    if found.owner in indexes:  # else of a key that this gateway does not have
                        indexes[found.owner].add(found)
                elif forgot is not None:
                    for index in indexes.values():
                        index.forget_sessions((forgot,))
            if rows:
                self._last = rows[-1][0]
            self._version = version
            gone = [forgot for _, _, forgot in rows if forgot is not None and not self._has_steps(forgot)]
        if gone and forgotten is not None:
            forgotten(gone)
        return sum(self._is_of_others(number) for number in turns)

    def _wanted(
        self, rows: Sequence[tuple[int, int | None, int | None]], indexes: Mapping[str, TurnIndex]
    ) -> list[int]:
        """The turns to read: those of others, and own ones that a deletion of their session takes, or has taken, from
        memory though they were added after it."""
        numbers = [turn for _, turn, _ in rows if turn is not None]
        if any(forgot is not None for _, _, forgot in rows):
            return numbers
        known = indexes.values()
        return [
            number
            for number in numbers
            if self._is_of_others(number) or all(index.get(number) is None for index in known)
        ]

    def _is_of_others(self, number: int) -> bool:
        return writer_of(number) != self._writer

    def _has_steps(self, session: int) -> bool:
        return self._db.execute("SELECT 1 FROM steps WHERE session = ? LIMIT 1", (session,)).fetchone() is not None

    def _turns(self, numbers: list[int]) -> dict[int, KnownTurn]:
        """Those that are still there; the others were forgotten meanwhile, which is a later row."""
        return {turn.id: turn for turn in turns_by_number(self._db, numbers)}

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()
