"""The sweep that makes the whole table: rows are appended, a stop loses nothing, the table is made from the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cache.replay.test_real_cache import random_sessions

pytestmark = pytest.mark.timeout(300)


def sweep(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own."""
    return subprocess.run(
        [sys.executable, "benchmarks/cache_sweep.py", *arguments],
        cwd=repository, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


def test_a_stopped_sweep_goes_on_where_it_was(repository: Path, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "rows.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in random_sessions(5, 8)), encoding="utf-8")
    names = "k3,k3:hints,upstream,upstream-best,bound,k3+states"
    command = (str(trace), "--out", str(out), "--concurrent", "2", "--policies", names)
    first = sweep(repository, *command)
    assert first.returncode == 0, first.stderr[-3000:]
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 6 * 5
    assert all(row["requests"] and 0 < row["computed"] <= row["prompt"] for row in rows)

    whole = out.read_text(encoding="utf-8")
    out.write_text(whole[: whole.rindex("{") + 20] + "\n", encoding="utf-8")  # the last row was cut by a stop
    again = sweep(repository, *command)
    assert again.stdout.count(" M in ") == 1, again.stdout
    rest = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    assert {(row["states"], row["kv_tokens"], row["policy"]): row["computed"] for row in rest} == {
        (row["states"], row["kv_tokens"], row["policy"]): row["computed"] for row in rows
    }

    printed = sweep(repository, "--table", str(out))
    assert printed.returncode == 0
    lines = printed.stdout.splitlines()
    assert len(lines) == 2 + 5 and lines[2].startswith("| 2 | 6 | 0.38 |")


def test_a_sweep_without_a_trace_says_so(repository: Path) -> None:
    done = sweep(repository)
    assert (done.returncode, done.stderr) == (2, "give a trace file, or --table FILE\n")
