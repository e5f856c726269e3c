"""Several processes that write to one ledger: nothing is lost, numbers never meet, and each knows the turns of all."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent_runtime.errors import LedgerError
from agent_runtime.ledger.following import Follower
from agent_runtime.ledger.reading import LedgerReader
from agent_runtime.ledger.records import StepRecord, TurnRecord
from agent_runtime.ledger.store import Ledger
from agent_runtime.ledger.turns import KnownTurn, TurnIndex, TurnKeys
from agent_runtime.ledger.writers import MAX_WRITERS, SharedNumbers, numbers, writer_of
from k3_sglang.chat.types import Message

WRITERS = 4

PROGRAM = """
import sys, time
from pathlib import Path
from agent_runtime.ledger.store import Ledger
from agent_runtime.ledger.writers import numbers
from tests.ledger.test_shared import step, turn
name, path = sys.argv[1], Path(sys.argv[2])
ledger = Ledger(path, shared=True)
given = numbers(ledger.writer, ledger.last_number())
number = 0
while True:
    one, two = next(given), next(given)
    ledger.append([step(one, number), turn(two, one)])
    print(one, two, flush=True)
    number += 1
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the ledger is."""
    return tmp_path / "ledger.db"


def step(number: int, content: int = 0, session: int = 7) -> StepRecord:
    """A request of a session that all writers go on with."""
    body = json.dumps({"messages": ["x" * 100] * (1 + content % 20)}).encode()
    return StepRecord(number, session, "session:a", None, 1_000, body, tuple(range(content % 50)), 10, {})


def turn(number: int, of: int, session: int = 7) -> TurnRecord:
    """Its output."""
    keys = TurnKeys(*(number.to_bytes(8, "big") + bytes([place] * 8) for place in range(7)))
    known = KnownTurn(number, session, "session:a", None, keys, Message("assistant", str(number)), "think", (1, 2), 10)
    return TurnRecord(known, of, 0, 1_000, (1, 2), {"signature": ""})


def test_one_that_does_not_share_is_refused_and_refuses(path: Path) -> None:
    with Ledger(path, shared=True) as first, Ledger(path, shared=True) as second:
        assert {first.writer, second.writer} == {1, 2}
        with pytest.raises(LedgerError, match="set ledger_shared"):
            Ledger(path)
    with Ledger(path) as alone:
        assert alone.writer == 0
        with pytest.raises(LedgerError, match="set ledger_shared"):
            Ledger(path, shared=True)


def test_a_place_is_free_again_when_its_writer_is_gone(path: Path) -> None:
    with Ledger(path, shared=True):
        with Ledger(path, shared=True) as second:
            assert second.writer == 2
        with Ledger(path, shared=True) as third:
            assert third.writer == 2


def test_there_are_only_so_many_places(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_runtime.ledger.writers.MAX_WRITERS", 2)
    with Ledger(path, shared=True), pytest.raises(LedgerError, match="has 1 writers"):
        Ledger(path, shared=True)


def test_numbers_ascend_whatever_the_clock_does_and_tell_their_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [2_000_000_000]
    monkeypatch.setattr(time, "time_ns", lambda: clock[0])
    given = SharedNumbers(5, last=0)
    seen = [next(given) for _ in range(3000)]
    clock[0] = 1_000_000_000
    seen += [next(given) for _ in range(3)]
    seen += [next(SharedNumbers(5, last=seen[-1])) for _ in range(1)]
    assert seen == sorted(set(seen))
    assert {writer_of(number) for number in seen} == {5}
    assert next(numbers(0, 41)) == 42
    monkeypatch.undo()
    assert next(SharedNumbers(MAX_WRITERS - 1, 0)) < 1 << 62, "above that bit are the numbers of named sessions"


def test_a_follower_gets_what_others_add_and_forget_once(path: Path) -> None:
    index = TurnIndex(10_000, 100)
    with Ledger(path, shared=True) as mine, Ledger(path, shared=True) as other:
        ours, theirs = numbers(mine.writer, 0), numbers(other.writer, 0)
        old = next(theirs)
        other.append([step(old), turn(next(theirs), old)])
        follower = Follower(path, mine.writer)
        assert follower.catch_up({"": index}) == 0, "what was there before is read from the turns themselves"
        own = next(ours)
        made_here = turn(next(ours), own)
        index.add(made_here.turn)
        mine.append([step(own), made_here])
        new, made = next(theirs), next(theirs)
        other.append([step(new, session=8), turn(made, new, session=8)])
        assert follower.catch_up({"": index}) == 1
        assert list(index.turns) == [made_here.turn.id, made]
        assert follower.catch_up({"": index}) == 0
        other.forget(8)
        follower.catch_up({"": index})
        assert list(index.turns) == [made_here.turn.id]
        index.check_integrity()
        follower.close()


@pytest.mark.parametrize("looks_between", [False, True])
def test_turns_added_after_their_session_was_forgotten_stay_known(path: Path, looks_between: bool) -> None:
    index = TurnIndex(10_000, 100)
    gone: list[int] = []
    with Ledger(path, shared=True) as mine, Ledger(path, shared=True) as other:
        ours = numbers(mine.writer, 0)
        follower = Follower(path, mine.writer)

        def add(made: TurnRecord, *, at_once: bool = True) -> None:
            index.add(made.turn)
            mine.append([step(made.step, session=8), *[made] * at_once])

        old, new = turn(next(ours), next(ours), session=8), turn(next(ours), next(ours), session=8)
        add(old)
        other.forget(8)
        add(new, at_once=not looks_between)
        if looks_between:  # the turn is known before it is written
            follower.catch_up({"": index}, gone.extend)
            mine.append([new])
        assert follower.catch_up({"": index}, gone.extend) == 0, "it is no turn of another"
        assert list(index.turns) == [new.turn.id]
        assert gone == [], "the session goes on"
        other.forget(8)
        follower.catch_up({"": index}, gone.extend)
        assert (len(index), gone) == (0, [8])
        index.check_integrity()
        follower.close()


def test_a_damaged_turn_is_logged_and_the_others_are_known(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = TurnIndex(10_000, 100)
    with Ledger(path, shared=True) as mine, Ledger(path, shared=True) as other:
        given = numbers(other.writer, 0)
        follower = Follower(path, mine.writer)
        first, second = turn(next(given), next(given)), turn(next(given), next(given))
        other.append([step(first.step), first, step(second.step), second])
        db = sqlite3.connect(path)
        db.executescript(f"DROP TRIGGER turns_append_only; UPDATE turns SET message = X'00' WHERE id = {first.turn.id}")
        db.close()
        assert follower.catch_up({"": index}) == 1
        assert list(index.turns) == [turn.id for turn in mine.known_turns(9)] == [second.turn.id]
        follower.close()
    assert caplog.text.count(f"turn {first.turn.id} of the ledger cannot be read") == 2


def test_a_turn_whose_session_was_forgotten_while_it_ran_leaves_nothing(path: Path) -> None:
    with Ledger(path, shared=True) as mine, Ledger(path, shared=True) as other:
        mine.append([step(100, session=8)])
        other.forget(8)
        mine.append([turn(101, 100, session=8)])
        db = sqlite3.connect(path)
        assert db.execute("SELECT (SELECT count(*) FROM turns), (SELECT count(turn) FROM journal)").fetchone() == (0, 0)
        db.close()


def test_a_session_that_another_has_forgotten_is_no_failure_of_bounds(path: Path) -> None:
    with Ledger(path, shared=True, max_age_s=1) as mine, Ledger(path, shared=True, max_age_s=1) as other:
        given = numbers(other.writer, 0)
        for session in range(3):
            other.append([step(next(given), session=session)])
        assert other.keep_bounds(10_000_000) == [0, 1]
        assert mine.keep_bounds(10_000_000) == []
        with pytest.raises(LedgerError, match="has no session 1"):
            mine.forget(1)


def test_writers_killed_at_any_moment_lose_nothing_and_harm_no_other(path: Path, repository: Path) -> None:
    dice = random.Random(5)
    said: list[int] = []
    running: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "writer", str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(repository)},
        )

    def kill(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate(timeout=30)
        said.extend(int(word) for line in out.splitlines(keepends=True) if line.endswith("\n") for word in line.split())

    for _ in range(WRITERS):
        running.append(start())
    for _ in range(2 * WRITERS):
        time.sleep(0.5 + dice.random())
        kill(running.pop(0))
        running.append(start())
    time.sleep(2)
    for process in running:
        assert process.poll() is None, "a writer ended by itself"
        kill(process)
    assert len(said) > 200 and len(set(said)) == len(said), "no number was given out twice"
    with LedgerReader(path) as reader:
        assert reader.check() == []
        stored = {step.id for step in reader.steps()} | {record.turn.id for record in reader.turns()}
    assert set(said) <= stored
