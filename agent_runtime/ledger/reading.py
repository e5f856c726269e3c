"""Reads a ledger: sessions, steps with their bodies and prompt ids, turns."""

import hashlib
import json
import logging
import sqlite3
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from agent_runtime.errors import LedgerError
from agent_runtime.ledger.deltas import Delta, restored, unpacked
from agent_runtime.ledger.records import TurnRecord, keys_from, message_from
from agent_runtime.ledger.schema import owner_column
from agent_runtime.ledger.turns import KnownTurn
from k3_sglang.chat.types import Channel

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16
_CACHED_BYTES = 64 * 1024 * 1024
_AT_ONCE = 500

_TURNS = (
    "SELECT {owner}, turns.id, steps.session, sessions.name, steps.parent, turns.keys, turns.message, turns.start, "
    "turns.ids, turns.whole, steps.prompt_tokens, turns.put_back, turns.step, turns.choice, turns.created_ms, "
    "turns.facts FROM turns JOIN steps ON steps.id = turns.step JOIN sessions ON sessions.id = steps.session "
)


def digest(value: bytes) -> bytes:
    """What a body or prompt is checked with when it has been put together again."""
    return hashlib.blake2b(value, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session, its name ("" without one), and what it has: times in milliseconds since 1970.

    ``owner`` is whose key it came with, "" without keys.
    """

    id: int
    name: str
    steps: int
    turns: int
    created_ms: int
    used_ms: int
    owner: str


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A step as stored; its body and ids are asked for separately."""

    id: int
    session: int
    parent: int | None
    created_ms: int
    prompt_tokens: int
    facts: Mapping[str, Any]


class StepValues:
    """Bodies and packed prompt ids of steps, put together from their deltas; the newest are remembered."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._known: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()
        self._bytes = 0

    def base(self, step: int | None, turn: int | None) -> tuple[bytes, bytes]:
        """What a request that goes on from a step, and from a turn of it, is stored as a change to."""
        if step is None:
            return b"", b""
        body, ids = self.get(step)
        return (body, ids) if turn is None else (body, ids + self._output(turn))

    def get(self, step: int) -> tuple[bytes, bytes]:
        """Body and packed ids of a step. Raises LedgerError when it is not there, ValueError when it is damaged."""
        changes: list[tuple[int, int | None, Delta, Delta]] = []
        at: int | None = step
        while at is not None and at not in self._known:
            row = self._db.execute(
                "SELECT base_step, base_turn, body_head, body_tail, body, ids_head, ids_tail, ids "
                "FROM steps WHERE id = ?",
                (at,),
            ).fetchone()
            if row is None:
                raise LedgerError(f"the ledger has no step {at}")
            changes.append((at, row[1], Delta(*row[2:5]), Delta(*row[5:8])))
            at = row[0]
        body, ids = (b"", b"") if at is None else self._known[at]
        for number, turn, body_change, ids_change in reversed(changes):
            base_ids = ids if turn is None else ids + self._output(turn)
            body, ids = restored(body, body_change), restored(base_ids, ids_change)
            self.remember(number, body, ids)
        return body, ids

    def remember(self, step: int, body: bytes, ids: bytes) -> None:
        """Keep a step's values, on which the next ones build."""
        if step in self._known:
            self._known.move_to_end(step)
            return
        self._known[step] = body, ids
        self._bytes += len(body) + len(ids)
        while self._bytes > _CACHED_BYTES and len(self._known) > 1:
            _, gone = self._known.popitem(last=False)
            self._bytes -= len(gone[0]) + len(gone[1])

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
        self._bytes = 0

    def _output(self, turn: int) -> bytes:
        row = self._db.execute("SELECT ids FROM turns WHERE id = ?", (turn,)).fetchone()
        if row is None:
            raise LedgerError(f"the ledger has no turn {turn}")
        return zlib.decompress(row[0])


class LedgerReader:
    """A ledger open for reading, also while a gateway writes to it. Not thread-safe.

    Raises:
        LedgerError: there is no such file, or it is no ledger.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)
            with closing(self._db.execute("SELECT id FROM steps LIMIT 1")) as rows:
                rows.fetchone()
        except sqlite3.Error as error:
            raise LedgerError(f"cannot read ledger {path}: {error}") from error
        self._values = StepValues(self._db)
        self._owner = owner_column(self._db)
        self._turns = _TURNS.format(owner=self._owner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def sessions(self) -> list[SessionSummary]:
        """All sessions, the one used last at the end."""
        rows = self._db.execute(
            "SELECT sessions.id, name, count(DISTINCT steps.id), count(turns.id), sessions.created_ms, "
            f"max(steps.created_ms), {self._owner} FROM sessions JOIN steps ON session = sessions.id "
            "LEFT JOIN turns ON turns.step = steps.id GROUP BY sessions.id ORDER BY max(steps.id)"
        )
        return [SessionSummary(*row) for row in rows]

    def steps(self, session: int | None = None) -> Iterator[StoredStep]:
        """The steps of a session, or of all, in the order in which they came."""
        where, values = ("WHERE session = ? ", (session,)) if session is not None else ("", ())
        rows = self._db.execute(
            f"SELECT id, session, parent, created_ms, prompt_tokens, facts FROM steps {where}ORDER BY id", values
        ).fetchall()
        for row in rows:
            number, owner, parent, created_ms, prompt_tokens, facts = row
            yield StoredStep(number, owner, parent, created_ms, prompt_tokens, json.loads(facts))

    def turns(self, session: int | None = None) -> Iterator[TurnRecord]:
        """The turns of a session, or of all, in the order in which they ended."""
        where, values = ("WHERE steps.session = ? ", (session,)) if session is not None else ("", ())
        for row in self._db.execute(f"{self._turns}{where}ORDER BY turns.id", values).fetchall():
            yield _turn_record(row)

    def turns_of(self, step: int) -> list[TurnRecord]:
        """The turns of one step."""
        return [
            _turn_record(row) for row in self._db.execute(f"{self._turns}WHERE turns.step = ? ORDER BY choice", (step,))
        ]

    def body(self, step: int) -> bytes:
        """The request's body, byte for byte as it was received. Raises LedgerError when it cannot be restored."""
        return self._checked(step, 0, "body_digest")

    def prompt_ids(self, step: int) -> tuple[int, ...]:
        """The ids the engine was given. Raises LedgerError when they cannot be restored."""
        return tuple(unpacked(self._checked(step, 1, "ids_digest")))

    def check(self) -> list[str]:
        """What is damaged, in words: SQLite's own findings, and every body and prompt that is not what it was."""
        problems = [str(row[0]) for row in self._db.execute("PRAGMA integrity_check") if row[0] != "ok"]
        for (number,) in self._db.execute("SELECT id FROM steps ORDER BY id").fetchall():
            try:
                self.body(number)
                self.prompt_ids(number)
            except LedgerError as error:
                problems.append(str(error))
        return problems

    def _checked(self, step: int, which: int, column: str) -> bytes:
        row = self._db.execute(f"SELECT {column} FROM steps WHERE id = ?", (step,)).fetchone()
        try:
            value = self._values.get(step)[which]
        except (ValueError, zlib.error) as error:
            raise LedgerError(f"step {step} of ledger {self.path} is damaged: {error}") from error
        if row is None or digest(value) != row[0]:
            raise LedgerError(f"step {step} of ledger {self.path} is damaged: its {column} does not fit")
        return value


@dataclass(frozen=True, slots=True)
class StepOutline:
    """A step without body, ids and messages: the name of its session and, per turn, number, choice, end and facts."""

    step: StoredStep
    name: str
    turns: Sequence[tuple[int, int, int, Mapping[str, Any]]]


def latest_steps(db: sqlite3.Connection, max_steps: int) -> list[StepOutline]:
    """The latest steps, oldest first."""
    rows = db.execute(
        "SELECT steps.id, session, parent, steps.created_ms, prompt_tokens, facts, name FROM steps "
        "JOIN sessions ON sessions.id = session ORDER BY steps.id DESC LIMIT ?",
        (max_steps,),
    ).fetchall()
    if not rows:
        return []
    turns: dict[int, list[tuple[int, int, int, Mapping[str, Any]]]] = {}
    first = rows[-1][0]
    for step, *turn, facts in db.execute(
        "SELECT step, id, choice, created_ms, facts FROM turns WHERE step >= ? ORDER BY step, choice", (first,)
    ):
        turns.setdefault(step, []).append((*turn, json.loads(facts)))
    outlines: list[StepOutline] = []
    for number, session, parent, created_ms, prompt_tokens, facts, name in reversed(rows):
        step = StoredStep(number, session, parent, created_ms, prompt_tokens, json.loads(facts))
        outlines.append(StepOutline(step, name, turns.get(number, ())))
    return outlines


def known_turns(db: sqlite3.Connection, max_turns: int, owner: str) -> list[KnownTurn]:
    """The latest turns of an owner, oldest first; damaged ones are logged and left out."""
    turns = _TURNS.format(owner="sessions.owner")
    rows = db.execute(f"{turns}WHERE sessions.owner = ? ORDER BY turns.id DESC LIMIT ?", (owner, max_turns)).fetchall()
    return list(_readable_turns(reversed(rows)))


def turns_by_number(db: sqlite3.Connection, numbers: Sequence[int]) -> Iterator[KnownTurn]:
    """The turns with these numbers that there are, in any order; damaged ones are logged and left out."""
    turns = _TURNS.format(owner="sessions.owner")
    for begin in range(0, len(numbers), _AT_ONCE):
        part = numbers[begin : begin + _AT_ONCE]
        marks = ",".join("?" * len(part))
        yield from _readable_turns(db.execute(f"{turns}WHERE turns.id IN ({marks})", part).fetchall())


def _readable_turns(rows: Iterable[tuple[Any, ...]]) -> Iterator[KnownTurn]:
    for row in rows:
        try:
            turn = _turn_record(row).turn
        except (zlib.error, ValueError, TypeError, LookupError):
            logger.exception("turn %s of the ledger cannot be read; it counts as not known", row[1])
            continue
        yield turn


def _turn_record(row: tuple[Any, ...]) -> TurnRecord:
    owner, number, session, name, parent, keys, message, start, ids, whole, prompt_tokens, put_back = row[:12]
    step, choice, created_ms, facts = row[12:]
    output = tuple(unpacked(zlib.decompress(ids)))
    known: dict[str, Any] = json.loads(facts)
    turn = KnownTurn(
        id=number,
        session=session,
        scope=name,
        parent=parent,
        keys=keys_from(keys),
        message=message_from(message),
        start=cast("Channel", start),
        ids=output if whole else None,
        prompt_tokens=prompt_tokens,
        put_back=bool(put_back),
        signature=known.get("signature", ""),
        owner=owner,
    )
    return TurnRecord(turn, step, choice, created_ms, output, known)
