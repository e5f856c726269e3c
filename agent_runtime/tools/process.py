"""Run a program in its own process group; bounded time and memory, and nothing of the group survives."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from agent_runtime.tools.result import join_cut
from agent_runtime.tools.threads import call_function

StopReason: TypeAlias = Literal["timeout", "output"]

# Seconds between SIGTERM and SIGKILL, and seconds to wait for the end of output once the program is gone.
_TERM_GRACE_S: Final = 2.0
_DRAIN_GRACE_S: Final = 0.25
# A process may fork while its session is looked through; one that only waits to be reaped is found each time.
_SESSION_SWEEPS: Final = 3


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended."""

    exit_code: int
    """Negative when a signal ended it."""
    output: str
    """Standard output and error as written, cut in the middle."""
    seconds: float
    stopped_by: StopReason | None
    """What made us end it, None when it ended by itself."""
    left_behind: bool
    """Whether a process of its group outlived it and held its output open, until it was killed."""


async def run_in_group(
    arguments: Sequence[str],
    *,
    directory: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    keep_bytes: int,
    max_bytes: int,
) -> Finished:
    """Run `arguments` with an empty standard input and wait for the end.

    Over the time or the output limit the group gets SIGTERM, and SIGKILL two seconds later. When the program
    ends by itself, or the caller is cancelled, whatever is left of the group and of its session is killed. A
    process that left the session on purpose (setsid) escapes; its output is no longer read.

    Args:
        keep_bytes: output kept in memory, half from its head and half from its tail.
        max_bytes: output after which the program is ended.

    Raises:
        OSError: the program cannot be started.
    """
    started = time.monotonic()
    output = _Output(keep_bytes, max_bytes)
    read_end, write_end = os.pipe()
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.connect_read_pipe(lambda: output, os.fdopen(read_end, "rb", buffering=0))
    except BaseException:
        os.close(write_end)
        raise
    try:
        try:
            process = subprocess.Popen(
                arguments,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        stopped_by, left_behind = await _until_gone(process, output, timeout_s)
    finally:
        transport.close()
    return Finished(process.wait(), output.text(), time.monotonic() - started, stopped_by, left_behind)


async def _until_gone(
    process: subprocess.Popen[bytes], output: _Output, timeout_s: float
) -> tuple[StopReason | None, bool]:
    """Wait until the program has ended or is ended, then end its group.

    The program stays a zombie until its group was signalled: that keeps its id, which is the group's id, from
    being given to strangers.
    """
    exited = asyncio.ensure_future(call_function(_wait_without_reaping, {"pid": process.pid}))
    try:
        stopped_by = await _wait(process.pid, exited, output, timeout_s)
        closed = await _within(output.closed, _DRAIN_GRACE_S)
        _kill_session(process.pid)
        await exited
        process.wait()
        await _within(output.closed, _DRAIN_GRACE_S)
        return stopped_by, stopped_by is None and not closed
    finally:
        if process.returncode is None:
            _kill_session(process.pid)
            # Nobody waits for the result any more, and waiting here would hold up the cancellation.
            threading.Thread(target=process.wait, name="reap-command", daemon=True).start()
        exited.cancel()


async def _wait(group: int, exited: asyncio.Future[None], output: _Output, timeout_s: float) -> StopReason | None:
    """Wait for the end of the program; at a limit, ask it to end and give it a moment."""
    flooded = asyncio.ensure_future(output.flooded.wait())
    try:
        done, _ = await asyncio.wait((exited, flooded), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if exited in done:
            return None
        os.killpg(group, signal.SIGTERM)
        await asyncio.wait((exited,), timeout=_TERM_GRACE_S)
        return "output" if flooded in done else "timeout"
    finally:
        flooded.cancel()


def _kill_session(leader: int) -> None:
    """Kill the program's group, and what moved to a group of its own in its session, as job control does."""
    os.killpg(leader, signal.SIGKILL)
    for _ in range(_SESSION_SWEEPS):
        found = [pid for name in os.listdir("/proc") if name.isdigit() and _session(pid := int(name)) == leader]
        others = [pid for pid in found if pid != leader]
        if not others:
            return
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event happens in the next `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def _wait_without_reaping(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


class _Output(asyncio.Protocol):
    """Collects a pipe's bytes: the head, a bounded tail, and a count of what fell between."""

    def __init__(self, keep_bytes: int, max_bytes: int) -> None:
        self.closed = asyncio.Event()
        self.flooded = asyncio.Event()
        self._half_bytes = keep_bytes // 2
        self._max_bytes = max_bytes
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._total_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._total_bytes += len(data)
        if self._total_bytes > self._max_bytes:
            self.flooded.set()
        room = self._half_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= self._half_bytes:
            self._tail_bytes -= len(self._tail.popleft())

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def text(self) -> str:
        """Everything that was kept, with a note in the middle when something was not."""
        tail = b"".join(self._tail)
        tail = tail[max(0, len(tail) - self._half_bytes) :]
        return join_cut(bytes(self._head), tail, self._total_bytes - len(self._head) - len(tail))
