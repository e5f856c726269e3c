"""Kills a process that writes to a ledger at random moments, again and again, and reads what is left.

    python benchmarks/ledger_crash.py --kills 1000      # some minutes

After each kill every record that the process was told to be safe must be there, and every body and prompt must be what
its digest says. The next process goes on with the same file.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from agent_runtime.guard.fingerprint import START
from agent_runtime.ledger.reading import LedgerReader
from agent_runtime.ledger.records import StepRecord, TurnRecord
from agent_runtime.ledger.store import Ledger
from agent_runtime.ledger.turns import KnownTurn, TurnKeys
from agent_runtime.ledger.writer import LedgerWriter
from k3_sglang.chat.types import Message

SESSIONS = 5
LONGEST_RUN_S = 0.25


@dataclass
class Result:
    """``kills`` processes were killed; ``told`` records they knew to be safe, ``stored`` were found in the end."""

    kills: int = 0
    told: int = 0
    stored: int = 0
    problems: list[str] | None = None


def write(path: Path) -> None:
    """Append to a ledger until killed; say on standard output which records are safe."""
    rng = random.Random(os.getpid())
    ledger = Ledger(path, max_bytes=50_000_000)
    number = ledger.last_number()
    writer = LedgerWriter(ledger, lambda _: None)
    bodies = [b"{}"] * SESSIONS
    prompts: list[list[int]] = [[]] * SESSIONS
    while True:
        session = rng.randrange(SESSIONS)
        bodies[session] = bodies[session][:-1] + rng.randbytes(rng.randint(1, 3000)) + b"}"
        prompts[session] = prompts[session] + rng.choices(range(160_000), k=rng.randint(1, 500))
        step, turn = number + 1, number + 2
        number = turn
        facts = {"replay": {"verdict": "new"}, "engine": []}
        ids = prompts[session]
        output = tuple(rng.choices(range(160_000), k=20))
        known = KnownTurn(
            turn, session + 1, "", None, TurnKeys(*[START] * 7), Message("assistant", "x"), "think", output, 1
        )
        writer.submit(StepRecord(step, session + 1, "", None, turn, bodies[session], ids, len(ids), facts))
        writer.submit(TurnRecord(known, step, 0, turn, output, {})).result()
        print(turn, flush=True)


def crash(path: Path, kills: int, seed: int = 0) -> Result:
    """Kill that many writers one after the other."""
    rng = random.Random(seed)
    result = Result(problems=[])
    assert result.problems is not None
    told: set[int] = set()
    while result.kills < kills and not result.problems:
        command = [sys.executable, __file__, "--write", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            time.sleep(rng.random() * LONGEST_RUN_S)
            process.send_signal(signal.SIGKILL)
            lines = (first + process.stdout.read()).split("\n")[:-1]
        told.update(map(int, lines))
        result.kills += 1
        with LedgerReader(path) as reader:
            stored = {record.turn.id for record in reader.turns()}
            result.problems += reader.check() if result.kills % 10 == 0 or kills <= 20 else []
        lost = told - stored
        if lost:
            result.problems.append(f"{len(lost)} records that were safe are not there, e.g. {min(lost)}")
        result.told, result.stored = len(told), len(stored)
        if len(stored) > 4000:  # what was checked is not checked for ever
            path.unlink()
            told.clear()
    return result


def main() -> int:
    """Kill and print; exit code 1 when anything was lost or damaged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write is not None:
        write(options.write)
    with tempfile.TemporaryDirectory() as folder:
        result = crash(Path(folder) / "ledger.db", options.kills, options.seed)
    print(result)
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
