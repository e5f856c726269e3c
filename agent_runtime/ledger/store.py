"""The ledger: an append-only SQLite file of every request and every turn, whole after a crash at any point."""

import json
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from agent_runtime.errors import LedgerError
from agent_runtime.ledger.deltas import delta, packed
from agent_runtime.ledger.reading import StepOutline, StepValues, digest, known_turns, latest_steps
from agent_runtime.ledger.records import StepRecord, TurnRecord, keys_bytes, keys_from, message_bytes
from agent_runtime.ledger.schema import migrate
from agent_runtime.ledger.turns import KnownTurn, TurnKeys
from agent_runtime.ledger.writers import WriterLock

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 30.0
"""How long a writer waits for another's transaction."""
_JOURNAL_ROWS = 1_000_000
"""Rows of the journal that stay: far more than any process that follows it is behind."""


class Ledger:
    """A ledger open for writing. Not thread-safe.

    One process writes to a file at a time, or several of one machine that all open it ``shared``; any may read it.

    Requests that go on from another store only what is new. Rows are never changed; whole sessions go, oldest use
    first, when the file is larger than ``max_bytes`` or they were last used more than ``max_age_s`` ago.

    Raises:
        LedgerError: the file cannot be opened, is in use by another writer, or is from a later version.
    """

    def __init__(
        self, path: Path, *, max_bytes: int | None = None, max_age_s: float | None = None, shared: bool = False
    ) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._warned = False
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = WriterLock(path, shared=shared)
        except OSError as error:
            raise LedgerError(f"cannot open ledger {path}: {error}") from error
        try:
            with self._lock.opening():
                self._db = self._open()
        except BaseException:
            self._lock.close()
            raise
        self._values = StepValues(self._db)

    @property
    def writer(self) -> int:
        """Which of several writers this is, from 1 on; 0 for the only one."""
        return self._lock.writer

    def _open(self) -> sqlite3.Connection:
        try:
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite would make it readable for others
            db = sqlite3.connect(self.path, BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(f"cannot open ledger {self.path}: {error}") from error
        try:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA secure_delete = ON")
            migrate(db, str(self.path))
        except sqlite3.Error as error:
            db.close()
            raise LedgerError(f"cannot open ledger {self.path}: {error}") from error
        except LedgerError:
            db.close()
            raise
        return db

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and let others write."""
        self._db.close()
        self._lock.close()

    def append(self, records: Sequence[StepRecord | TurnRecord]) -> None:
        """Add records in one transaction: all of them are there afterwards, or none. Raises sqlite3.Error."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for record in records:
                if isinstance(record, StepRecord):
                    self._append_step(record)
                else:
                    self._append_turn(record)
            self._db.execute("COMMIT")
        except BaseException:
            self._values.clear()
            self._db.execute("ROLLBACK")
            raise

    def _append_step(self, step: StepRecord) -> None:
        self._db.execute(
            "INSERT INTO sessions (id, name, created_ms, owner) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (step.session, step.name, step.created_ms, step.owner),
        )
        base_step, base_turn = self._base(step)
        base_body, base_ids = self._values.base(base_step, base_turn)
        ids = packed(step.ids)
        body_delta, ids_delta = delta(base_body, step.body), delta(base_ids, ids)
        self._db.execute(
            "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                step.id, step.session, step.parent, step.created_ms, base_step, base_turn,
                *body_delta, digest(step.body), *ids_delta, digest(ids), step.prompt_tokens, json.dumps(step.facts),
            ),
        )  # fmt: skip
        self._values.remember(step.id, step.body, ids)

    def _append_turn(self, record: TurnRecord) -> None:
        turn = record.turn
        # A session may be deleted while one of its steps runs: a turn of no step would be found by nothing, and stay.
        added = self._db.execute(
            "INSERT INTO turns SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM steps WHERE id = ?)",
            (
                turn.id, record.step, record.choice, record.created_ms, turn.start, message_bytes(turn.message),
                zlib.compress(packed(record.ids)), turn.ids is not None, keys_bytes(turn.keys), turn.put_back,
                json.dumps(record.facts), record.step,
            ),
        ).rowcount  # fmt: skip
        if added and self.writer:
            self._db.execute("INSERT INTO journal (turn) VALUES (?)", (turn.id,))

    def _base(self, step: StepRecord) -> tuple[int | None, int | None]:
        """The step and turn of the same session that a request goes on from; else the session's last step."""
        if step.parent is not None:
            row = self._db.execute(
                "SELECT steps.id FROM turns JOIN steps ON steps.id = turns.step WHERE turns.id = ? AND session = ?",
                (step.parent, step.session),
            ).fetchone()
            if row is not None:
                return row[0], step.parent
        (last,) = self._db.execute("SELECT max(id) FROM steps WHERE session = ?", (step.session,)).fetchone()
        return last, None

    def last_number(self) -> int:
        """The highest number of a step or turn, 0 in an empty ledger."""
        (step,) = self._db.execute("SELECT max(id) FROM steps").fetchone()
        (turn,) = self._db.execute("SELECT max(id) FROM turns").fetchone()
        return max(step or 0, turn or 0)

    def known_turns(self, max_turns: int, owner: str = "") -> list[KnownTurn]:
        """The latest turns of an owner, oldest first, for the index in memory."""
        return known_turns(self._db, max_turns, owner)

    def latest_steps(self, max_steps: int) -> list[StepOutline]:
        """The latest steps without their content, oldest first."""
        return latest_steps(self._db, max_steps)

    def older_keys(self, turns: int, owner: str = "") -> Iterator[TurnKeys]:
        """Places of all but the latest turns of an owner."""
        rows = self._db.execute(
            "SELECT turns.keys FROM turns JOIN steps ON steps.id = turns.step "
            "JOIN sessions ON sessions.id = steps.session WHERE sessions.owner = ? "
            "ORDER BY turns.id DESC LIMIT -1 OFFSET ?",
            (owner, turns),
        )
        return (keys_from(row[0]) for row in rows)

    def forget(self, session: int) -> None:
        """Delete a session with all its steps and turns; the space is overwritten. Raises LedgerError for none such."""
        if not self._forgotten(session):
            raise LedgerError(f"ledger {self.path} has no session {session}; `sessions` lists those it has")

    def _forgotten(self, session: int) -> bool:
        """Delete a session; False when there is none such, as after another writer has deleted it."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            there = self._db.execute("DELETE FROM sessions WHERE id = ?", (session,)).rowcount > 0
            if there:
                steps = "SELECT id FROM steps WHERE session = ?"
                self._db.execute(f"DELETE FROM turns WHERE step IN ({steps})", (session,))
                self._db.execute("DELETE FROM steps WHERE session = ?", (session,))
            if there and self.writer:
                self._db.execute("INSERT INTO journal (forgot) VALUES (?)", (session,))
                self._db.execute(
                    "DELETE FROM journal WHERE seq <= (SELECT max(seq) FROM journal) - ?", (_JOURNAL_ROWS,)
                )
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._values.clear()
        if not there:
            return False
        # A script, because this statement gives back one page each time it is stepped, and only a script goes on.
        self._db.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);")
        return True

    def keep_bounds(self, now_ms: int) -> list[int]:
        """Forget sessions that are too old, then the oldest until the size fits. Returns the forgotten ones.

        The session used last stays, whatever its size.
        """
        gone: list[int] = []
        order = self._db.execute(
            "SELECT session, max(created_ms) FROM steps GROUP BY session ORDER BY max(id)"
        ).fetchall()
        for session, used_ms in order[:-1]:
            too_old = self._max_age_s is not None and used_ms < now_ms - 1000 * self._max_age_s
            if not too_old and not self._is_too_large():
                break
            if self._forgotten(session):
                gone.append(session)
        if self._is_too_large() and not self._warned:
            self._warned = True
            logger.warning("ledger %s: the session used last is larger than %s bytes", self.path, self._max_bytes)
        return gone

    def _is_too_large(self) -> bool:
        if self._max_bytes is None:
            return False
        (pages,) = self._db.execute("PRAGMA page_count").fetchone()
        (free,) = self._db.execute("PRAGMA freelist_count").fetchone()
        (page_bytes,) = self._db.execute("PRAGMA page_size").fetchone()
        return (pages - free) * page_bytes > self._max_bytes
