"""A gateway killed at random moments: the sessions go on with the very prompts of a run that nobody kills."""

import json
import os
import subprocess
import sys
from pathlib import Path

KILLS = 30


def test_a_gateway_killed_at_random_moments_loses_no_turn_whose_end_was_seen(repository: Path) -> None:
    """In a process of its own, which forks; the whole thousand kills are run by hand."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gateway_crash", "--kills", str(KILLS), "--seed", "3"],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert facts["kills"] >= KILLS and facts["seen"] == facts["stored"] > 0
    assert len(facts["moments"]) >= 3, "kills at the start, within turns and between them"
