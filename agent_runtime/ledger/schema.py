"""The ledger's tables, and the steps from one version of them to the next."""

import sqlite3

from agent_runtime.errors import LedgerError

_V1 = """
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,              -- the client's name for the conversation, '' without one
    created_ms INTEGER NOT NULL
);
CREATE TABLE steps (                 -- one request
    id INTEGER PRIMARY KEY,          -- steps and turns are numbered together, in the order they happened
    session INTEGER NOT NULL REFERENCES sessions(id),
    parent INTEGER,                  -- the turn that ends its history, if known; may belong to another session
    created_ms INTEGER NOT NULL,
    base_step INTEGER,               -- body and ids are stored as what is new beyond this step of the same session
    base_turn INTEGER,               -- and, for the ids, beyond this turn of it
    body_head INTEGER NOT NULL,
    body_tail INTEGER NOT NULL,
    body BLOB NOT NULL,
    body_digest BLOB NOT NULL,
    ids_head INTEGER NOT NULL,
    ids_tail INTEGER NOT NULL,
    ids BLOB NOT NULL,
    ids_digest BLOB NOT NULL,
    prompt_tokens INTEGER NOT NULL,  -- as the engine counts them, images expanded
    facts TEXT NOT NULL              -- JSON: verdicts, and what the engine was asked beside the ids
);
CREATE INDEX steps_by_session ON steps(session, id);
CREATE TABLE turns (                 -- what was generated for one choice of a step
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL REFERENCES steps(id),
    choice INTEGER NOT NULL,
    created_ms INTEGER NOT NULL,
    start TEXT NOT NULL,
    message BLOB NOT NULL,           -- compressed JSON: content, reasoning, calls as delivered
    ids BLOB NOT NULL,               -- compressed uint32: all output ids
    whole INTEGER NOT NULL,          -- 1: may be replayed from its ids
    keys BLOB NOT NULL,              -- digests of its place, 16 bytes each
    put_back INTEGER NOT NULL,       -- 1: the client had left its parent out
    facts TEXT NOT NULL              -- JSON: finish reason, usage, warnings, signature
);
CREATE INDEX turns_by_step ON turns(step);
CREATE TRIGGER sessions_append_only BEFORE UPDATE ON sessions BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER steps_append_only BEFORE UPDATE ON steps BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER turns_append_only BEFORE UPDATE ON turns BEGIN SELECT RAISE(ABORT, 'append-only'); END;
"""

_V2 = """
ALTER TABLE sessions ADD COLUMN owner TEXT NOT NULL DEFAULT '';  -- whose key it came with, '' without keys
CREATE INDEX sessions_by_owner ON sessions(owner);
CREATE TABLE journal (               -- what several processes that write to one ledger did, in the order of commits
    seq INTEGER PRIMARY KEY,
    turn INTEGER,                    -- was added
    forgot INTEGER                   -- this session was deleted
);
"""

MIGRATIONS: tuple[str, ...] = (_V1, _V2)
"""Statements that lead from version n to n + 1; ``PRAGMA user_version`` is how many have been run."""


def owner_column(connection: sqlite3.Connection) -> str:
    """The owner of a session in SQL, also in a file of a version that knows none."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return "sessions.owner" if version > MIGRATIONS.index(_V2) else "''"


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """Bring the tables to this version, each step whole or not at all.

    Raises:
        LedgerError: the file was written by a later version.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise LedgerError(
            f"ledger {path} has version {version}, this program knows {len(MIGRATIONS)}: "
            "use the later program, or name another file"
        )
    for number in range(version, len(MIGRATIONS)):
        connection.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;")
