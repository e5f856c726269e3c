"""The ledger gives back what it was given, to the byte, after growth, crashes, migrations and deletions."""

import json
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.errors import LedgerError
from agent_runtime.ledger import schema
from agent_runtime.ledger.deltas import common_prefix_len, delta, packed, restored, unpacked
from agent_runtime.ledger.reading import LedgerReader
from agent_runtime.ledger.records import StepRecord, TurnRecord
from agent_runtime.ledger.store import Ledger
from agent_runtime.ledger.turns import KnownTurn, TurnKeys
from benchmarks.ledger_crash import crash
from k3_sglang.chat.types import Message, ToolCall

KEYS = TurnKeys(*(bytes((value,)) * 16 for value in range(7)))
FACTS = {"replay": {"verdict": "new"}, "engine": []}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file in a folder that does not exist yet."""
    return tmp_path / "private" / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    """An empty ledger."""
    with Ledger(path) as opened:
        yield opened


def step(
    number: int, session: int = 1, *, parent: int | None = None, body: bytes = b"{}", ids: Sequence[int] = ()
) -> StepRecord:
    """A request."""
    return StepRecord(number, session, "name", parent, 1000 * number, body, ids, 7, FACTS)


def turn(
    number: int, at: int, ids: tuple[int, ...] = (1, 2), *, session: int = 1, parent: int | None = None
) -> TurnRecord:
    """An output, with half a surrogate pair in its text."""
    message = Message("assistant", "text \ud800", "thinking", (ToolCall("i", "f", '{"a":  1}'),))
    known = KnownTurn(number, session, "name", parent, KEYS, message, "think", ids, 7, put_back=True)
    return TurnRecord(known, at, 0, 1000 * number, ids, {"finish": "stop"})


@given(first=st.binary(max_size=60), second=st.binary(max_size=60), shared=st.binary(max_size=200))
def test_a_delta_restores_its_value(first: bytes, second: bytes, shared: bytes) -> None:
    for base, value in ((first, second), (shared + first, shared + second), (first + shared, second + shared)):
        assert restored(base, delta(base, value)) == value
        common = common_prefix_len(base, value)
        assert base[:common] == value[:common]
        assert base[common : common + 1] != value[common : common + 1] or common == min(len(base), len(value))


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_survive_packing(ids: list[int]) -> None:
    assert list(unpacked(packed(ids))) == ids


grown = st.lists(
    st.tuples(st.integers(1, 3), st.booleans(), st.binary(max_size=50), st.lists(st.integers(0, 200_000), max_size=20)),
    max_size=12,
)


@settings(deadline=None, max_examples=40)
@given(requests=grown)
def test_every_body_and_every_prompt_comes_back_whatever_it_was_stored_beyond(
    requests: list[tuple[int, bool, bytes, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger.db"
    bodies: dict[int, bytes] = {}
    prompts: dict[int, tuple[int, ...]] = {}
    last: dict[int, tuple[int, int, tuple[int, ...]]] = {}
    with Ledger(path) as ledger:
        for number, (session, extends, new_bytes, new_ids) in enumerate(requests):
            at, answered = 2 * number + 1, 2 * number + 2
            before, parent, output = last.get(session, (0, None, ()))
            body = bodies.get(before, b"")[: -2 if extends else 3] + new_bytes + b"]}"
            ids = (*prompts.get(before, ()), *output, *new_ids) if extends else tuple(new_ids)
            bodies[at], prompts[at] = body, ids
            said = tuple(new_ids[::-1])
            ledger.append([step(at, session, parent=parent, body=body, ids=ids)])
            ledger.append([turn(answered, at, said, session=session, parent=parent)])
            last[session] = at, answered, said
    with LedgerReader(path) as reader:
        assert {number: reader.body(number) for number in bodies} == bodies
        assert {number: reader.prompt_ids(number) for number in prompts} == prompts
        assert reader.check() == []


def test_a_step_that_goes_on_from_another_stores_only_what_is_new(path: Path, ledger: Ledger) -> None:
    history = [{"role": "user", "content": f"message {number} {'x' * 50}"} for number in range(2000)]
    ids = list(range(100_000))
    body = json.dumps({"messages": history, "tools": ["t" * 1000]}).encode()
    ledger.append([step(1, body=body, ids=ids), turn(2, 1, (5, 6))])
    longer = json.dumps({"messages": [*history, {"role": "user", "content": "more"}], "tools": ["t" * 1000]}).encode()
    ledger.append([step(3, parent=2, body=longer, ids=[*ids, 5, 6, 7])])
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT length(body), length(ids) FROM steps ORDER BY id").fetchall()
    db.close()
    assert rows[0][1] > 10_000
    assert rows[1][0] < 100
    assert rows[1][1] < 20


def test_turns_come_back_as_they_were(path: Path, ledger: Ledger) -> None:
    records = [turn(2, 1), turn(3, 1, ())]
    ledger.append([step(1, parent=9), *records])
    wanted = [record.turn for record in records]
    assert [(t.message, t.ids, t.keys, t.put_back) for t in ledger.known_turns(10)] == [
        (t.message, t.ids, t.keys, t.put_back) for t in wanted
    ]
    assert [t.parent for t in ledger.known_turns(10)] == [9, 9]
    assert [t.id for t in ledger.known_turns(1)] == [3]
    assert list(ledger.older_keys(1)) == [KEYS]
    assert ledger.last_number() == 3


def test_nothing_on_record_can_be_changed(path: Path, ledger: Ledger) -> None:
    ledger.append([step(1), turn(2, 1)])
    with sqlite3.connect(path) as db:
        for table in ("sessions", "steps", "turns"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(f"UPDATE {table} SET created_ms = 0")
    db.close()


def test_a_batch_is_there_whole_or_not_at_all(ledger: Ledger, path: Path) -> None:
    ledger.append([step(1)])
    with pytest.raises(sqlite3.IntegrityError):
        ledger.append([step(2), step(1)])
    with LedgerReader(path) as reader:
        assert [stored.id for stored in reader.steps()] == [1]
    ledger.append([step(2, body=b"again")])
    with LedgerReader(path) as reader:
        assert reader.body(2) == b"again"


def test_a_damaged_step_is_named(path: Path, ledger: Ledger) -> None:
    ledger.append([step(1, body=b"body one"), step(2, body=b"body two")])
    with sqlite3.connect(path) as db:
        db.execute("DROP TRIGGER steps_append_only")
        db.execute("UPDATE steps SET body_head = 3 WHERE id = 2")
    db.close()
    with LedgerReader(path) as reader:
        assert reader.body(1) == b"body one"
        with pytest.raises(LedgerError, match="step 2 of ledger .* is damaged"):
            reader.body(2)
        assert len(reader.check()) == 1


def test_only_the_owner_may_read_the_file(path: Path, ledger: Ledger) -> None:
    ledger.append([step(1)])
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_second_writer_is_refused_and_a_reader_is_not(path: Path, ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="another process"):
        Ledger(path)
    ledger.append([step(1)])
    with LedgerReader(path) as reader:
        assert len(list(reader.steps())) == 1


def test_a_ledger_of_a_later_version_is_refused(path: Path) -> None:
    Ledger(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {len(schema.MIGRATIONS) + 1}")
    db.close()
    with pytest.raises(LedgerError, match=f"version {len(schema.MIGRATIONS) + 1}.*knows {len(schema.MIGRATIONS)}"):
        Ledger(path)
    Ledger(path.with_name("other.db")).close()


def test_an_older_ledger_is_brought_up_step_by_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(path) as ledger:
        ledger.append([step(1, body=b"kept")])
    added = "CREATE TABLE notes (step INTEGER PRIMARY KEY, text TEXT NOT NULL);"
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, added))
    Ledger(path).close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (len(schema.MIGRATIONS),)
        assert db.execute("SELECT count(*) FROM notes").fetchone() == (0,)
    db.close()
    with LedgerReader(path) as reader:
        assert reader.body(1) == b"kept"


@pytest.mark.parametrize("content", [b"not a database, but long enough to be taken for one" * 40, b""])
def test_what_is_no_ledger_is_refused_for_reading(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.db").write_bytes(content)
    with pytest.raises(LedgerError, match=r"x\.db"):
        LedgerReader(tmp_path / "x.db")


def test_a_folder_cannot_be_a_ledger(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot open ledger"):
        Ledger(tmp_path)


def test_sessions_unused_for_longest_go_when_the_file_is_too_large(path: Path) -> None:
    noise = [bytes((number * 7 + place) % 251 for place in range(0, 60_000)) for number in range(6)]
    with Ledger(path, max_bytes=200_000) as ledger:
        for number in range(6):
            body = b"".join(bytes((b ^ (i % 255),)) for i, b in enumerate(noise[number]))
            ids = [(number * 7919 + place * 104729) % 160_000 for place in range(20_000)]
            ledger.append([step(number + 1, session=number + 1, body=body, ids=ids)])
        gone = ledger.keep_bounds(0)
        assert gone == list(range(1, len(gone) + 1))
        assert 0 < len(gone) < 6
        assert ledger.keep_bounds(0) == []
    with LedgerReader(path) as reader:
        assert [session.id for session in reader.sessions()] == list(range(len(gone) + 1, 7))
        assert reader.check() == []
    assert path.stat().st_size <= 260_000


def test_sessions_go_when_they_are_too_old_but_never_the_last(path: Path) -> None:
    with Ledger(path, max_age_s=10) as ledger:
        ledger.append([step(1, 1), turn(2, 1), step(3, 2), step(20, 3), step(21, 1)])
        assert ledger.keep_bounds(now_ms=21_000) == [2]
        assert ledger.keep_bounds(now_ms=10_000_000) == [3]
    with LedgerReader(path) as reader:
        assert [stored.id for stored in reader.steps()] == [1, 21]


def test_a_forgotten_session_leaves_no_text_in_the_file(path: Path) -> None:
    secret = b"zq" * 20
    with Ledger(path) as ledger:
        ledger.append([step(1, 1, body=secret), step(2, 2, body=b"other")])
        with pytest.raises(LedgerError, match="no session 3"):
            ledger.forget(3)
        before = sqlite3.connect(path)
        (stored,) = before.execute("SELECT body FROM steps WHERE id = 1").fetchone()
        before.close()
        ledger.forget(1)
    assert stored not in path.read_bytes()
    with LedgerReader(path) as reader:
        assert [session.id for session in reader.sessions()] == [2]


def test_kill_at_any_moment_loses_nothing_that_was_safe(tmp_path: Path) -> None:
    result = crash(tmp_path / "ledger.db", kills=12)
    assert result.problems == []
    assert result.told > 0


def test_a_file_from_before_there_were_owners_is_read_and_brought_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        Ledger(path).close()
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO sessions VALUES (5, 'old', 1)")
        db.execute("INSERT INTO steps VALUES (1, 5, NULL, 1, NULL, NULL, 0, 0, x'', x'', 0, 0, x'', x'', 0, '{}')")
    db.close()
    with LedgerReader(path) as reader:
        assert [(session.owner, session.name) for session in reader.sessions()] == [("", "old")]
        assert list(reader.turns()) == []
    Ledger(path).close()
    with LedgerReader(path) as reader:
        assert [(session.owner, session.name) for session in reader.sessions()] == [("", "old")]
