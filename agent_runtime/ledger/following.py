"""What other writers of a shared ledger add and forget, brought into this process's memory."""

import sqlite3
from collections.abc import Mapping
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

    def catch_up(self, indexes: Mapping[str, TurnIndex]) -> int:
        """Bring in all that others have committed by now, each owner's turns into the index of that owner.

        Returns how many turns came. Raises sqlite3.Error.
        """
        with self._lock:
            (version,) = self._db.execute("PRAGMA data_version").fetchone()
            if version == self._version:
                return 0
            rows = self._db.execute(
                "SELECT seq, turn, forgot FROM journal WHERE seq > ? ORDER BY seq", (self._last,)
            ).fetchall()
            numbers = [turn for _, turn, _ in rows if turn is not None and writer_of(turn) != self._writer]
            turns = self._turns(numbers)
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
            return len(turns)

    def _turns(self, numbers: list[int]) -> dict[int, KnownTurn]:
        """Those that are still there; the others were forgotten meanwhile, which is a later row."""
        return {turn.id: turn for turn in turns_by_number(self._db, numbers)}

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()
