"""What the launcher promises about its processes: Ctrl-C leaves none, a killed scheduler is reported."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.engine.conftest import two_free_ports
from tests.engine.stack import STOP_TIMEOUT_S, Stack, configuration, start, stop

FAILED = 1


def descendants(pid: int) -> set[int]:
    """All processes below one, from the kernel's parent pointers."""
    children: dict[int, list[int]] = {}
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    for line in listing.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found: set[int] = set()
    queue = [pid]
    while queue:
        for child in children.get(queue.pop(), []):
            found.add(child)
            queue.append(child)
    return found


def alive(pid: int) -> bool:
    """Whether a process exists and is more than a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def own_stack(repository: Path) -> Stack:
    """A stack of its own, which the test ends."""
    return start(configuration(repository), *two_free_ports())


def scheduler_of(pids: set[int]) -> int:
    """The process that names itself SGLang's scheduler."""
    for pid in pids:
        if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no scheduler process found")


def test_ctrl_c_leaves_no_process(own_stack: Stack) -> None:
    below = descendants(own_stack.process.pid)
    assert len(below) >= 4
    assert stop(own_stack) == 0
    assert [pid for pid in below if alive(pid)] == []


def test_a_killed_scheduler_ends_the_launcher_with_a_message(own_stack: Stack) -> None:
    below = descendants(own_stack.process.pid)
    scheduler = scheduler_of(below)
    os.kill(scheduler, signal.SIGKILL)
    assert own_stack.process.wait(STOP_TIMEOUT_S) == FAILED
    assert own_stack.pump is not None
    own_stack.pump.join(STOP_TIMEOUT_S)
    assert any("launch: error:" in line for line in own_stack.output)
    assert [pid for pid in below if alive(pid)] == []
