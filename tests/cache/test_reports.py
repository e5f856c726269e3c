"""What field reports of other engines tell, under their numbers, on SGLang's real tree with our components.

Those that need an engine (B34, B37) are in ``tests/engine/test_cache_storms.py``; there is no B35.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def seen(repository: Path) -> dict[str, dict[str, Any]]:
    """What every scenario saw; a wrong hit, a lost slot or an assertion of SGLang ends the program."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.cache.reports_machine"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=repository, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_b36_with_every_slot_locked_a_checkpoint_is_skipped_and_counted_and_nothing_ends(
    seen: dict[str, dict[str, Any]],
) -> None:
    """Elsewhere an assertion ended the scheduler although the pool was half full."""
    assert seen["b36"]["skipped"] == 1
    assert seen["b36"]["no_slot_for_hit"] == 1
    assert seen["b36"]["later_hit"] == 53, "once there is room, hits work again"


def test_b38_a_shared_prefix_is_reused_although_its_end_was_nobodys_end(seen: dict[str, dict[str, Any]]) -> None:
    """Prompts that share 512 and then 499 tokens with a first one of 600.

    With chunks shorter than the prefix the last chunk's end is reused at once. With longer ones there is nothing
    before 499 the first time; that request leaves a state there, so the next one reuses all of it.
    """
    assert seen["b38"]["64"] == [0, 512, 448, 499]
    assert seen["b38"]["1024"] == [0, 0, 0, 499]


def test_b38_a_stable_system_prompt_is_kept_on_second_sight(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["b38"]["system prompt"] == [0, 0, 56]


def test_b39_a_hit_is_a_pair_and_half_of_one_is_a_shorter_hit(seen: dict[str, dict[str, Any]]) -> None:
    """Elsewhere KV was rebuilt on a hit and the state was not. A state never outlives its KV: both go in one step."""
    assert seen["b39"]["state gone"] == [0, 30, "evicted"]
    assert seen["b39"]["turn end"] == 130
    assert seen["b39"]["kv gone"] == 0
    assert seen["b39"]["after"] == [0, "evicted"]
