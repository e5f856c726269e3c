"""Random operations on SGLang's real tree with our components give what computing without a cache gives.

``K3_TREE_SEQUENCES`` sets the number of sequences; 2,000 take about a minute on an idle core.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SEQUENCES = int(os.environ.get("K3_TREE_SEQUENCES", "2000"))


def cases(count: int, seed: int) -> list[dict[str, Any]]:
    """Shapes and seeds of the sequences: pages, chunks, pools, exact states and states on a grid."""
    chooser = random.Random(seed)
    made: list[dict[str, Any]] = []
    for _ in range(count):
        page = chooser.choice([1, 1, 48, 64, 128])
        extra_buffer = chooser.random() < 0.25
        made.append(
            {
                "seed": chooser.randrange(1 << 30),
                "page": page,
                "chunk": max(chooser.choice([16, 64]), page),
                "extra_buffer": extra_buffer,
                "slots": chooser.choice([15, 24] if extra_buffer else [10, 14, 18] if page > 1 else [7, 10, 18]),
                "kv_tokens": chooser.choice([1024, 2048]),
                "operations": chooser.choice([10, 25]),
                "ahead": not extra_buffer and chooser.random() < 0.5,
            }
        )
    return made


def run(repository: Path, lines: list[dict[str, Any]]) -> dict[str, int]:
    """Run the tree machine; returns its counts.

    Raises:
        AssertionError: with the failing case, which can be given to the program alone.
    """
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cache.tree_machine"],
        input="\n".join(json.dumps(line) for line in lines),
        capture_output=True,
        text=True,
        cwd=repository,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(3600)
def test_whatever_the_tree_hands_out_is_what_an_engine_without_a_cache_computes(repository: Path) -> None:
    seen = run(repository, cases(SEQUENCES, seed=1))
    assert seen["sequences"] == SEQUENCES
    # What the sequences must have met, or they prove little.
    for event in ("hits", "cuts", "aborted", "aborted_in_prefill", "retracted", "skipped_no_slot", "skipped_bad_hint"):
        assert seen[event] > 0, f"no sequence met {event}: {seen}"
    for role in ("tip", "prompt_end", "superseded", "fork"):
        assert seen[f"evicted_{role}"] > 0, seen
