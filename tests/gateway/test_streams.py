"""Streams of many clients at once, and clients that break off: the benchmark in small, and that it can fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gateway_streams import Stream, check

NONCE, OTHER = f"nonce{'0' * 16}", f"nonce{'1' * 16}"


def test_no_stream_shows_another_ones_text_and_broken_ones_leave_nothing(repository: Path) -> None:
    """In processes of their own; three hundred are run by hand."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gateway_streams", "--streams", "30", "--storm", "30"],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert facts["problems"] == 0
    assert facts["storm"]["broken_before_first"] + facts["storm"]["broken_in_the_middle"] >= 10
    for left in (facts["left"], facts["storm"]["left"]):
        assert (left["engine"], left["slots"]) == (0, 0)


def problems(text: str, *, whole: bool = True) -> list[str]:
    """What the check finds in a stream."""
    stream = Stream(NONCE, total_s=1.0 if whole else None)
    check(stream, text, expect=True)
    return stream.problems


def test_the_check_finds_text_of_others_missing_text_and_a_missing_end() -> None:
    said = [f'{{"content":"{NONCE[:7]}"}}', f'{{"content":"{NONCE[7:]} "}}'] * 10
    assert problems("\n".join([*said, "data: [DONE]"])) == []
    assert "shows its nonce 9 times" in problems("\n".join([*said[:-2], "data: [DONE]"]))[0]
    assert "has no end" in problems("\n".join(said))[0]
    mixed = [f'{{"content":"{OTHER[:7]}"}}', f'{{"content":"{OTHER[7:]}"}}']
    assert "holds another's nonce" in problems("\n".join([*said, *mixed, "data: [DONE]"]))[0]
    assert "shows ['nonce1" in problems(f'{{"content":"{OTHER}"}}', whole=False)[0]
