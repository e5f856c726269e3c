"""One child server: started in its own session, its output passed on line by line, stopped without leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

TAIL_LINES = 40
PIPE_CHUNK_BYTES = 65_536
KILL_TIMEOUT_S = 10.0
TAIL_LINE_CHARS = 300
PR_SET_PDEATHSIG = 1
"""prctl option: signal to get when the parent dies (``prctl(2)``)."""
PR_SET_CHILD_SUBREAPER = 36
"""prctl option: descendants that lose their parent become our children, so that we can clear them away."""

_LIBC = ctypes.CDLL(None)


class Child:
    """A running child and everything it started.

    The child leads a new session. Processes it starts stay in that session even after they lose their parent, so the
    session is what is killed at the end. Output of all of them arrives through one pipe.
    """

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, output: int, sink: Callable[[str, str], None]
    ) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines of output, for a message about a crash."""
        self._process = process
        self._sink = sink
        self._pump = asyncio.create_task(self._pass_on(output))

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        sink: Callable[[str, str], None],
    ) -> Child:
        """Start a program; ``sink(name, line)`` gets each line of its output.

        Raises:
            OSError: the program cannot be started.
        """
        # A pipe of our own: asyncio's would make wait() hang while a grandchild holds the other end.
        output, child_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=dict(environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=child_end,
                stderr=child_end,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(child_end)
        return cls(name, process, output, sink)

    @property
    def pid(self) -> int:
        """Process and session id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal, None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the child itself (not for what it started)."""
        return await self._process.wait()

    async def stop(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Ask it to finish, wait ``grace_s`` seconds or until ``hurry``, then kill what is left of its session."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            await _first_of(self.wait(), hurry.wait(), timeout_s=grace_s)
        await kill_session(self.pid)
        await self.wait()
        # Ends by itself once no process holds the pipe; the limit is for one that moved to a session of its own.
        await asyncio.wait([self._pump], timeout=KILL_TIMEOUT_S)
        self._pump.cancel()

    async def _pass_on(self, output: int) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(output, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            rest = b""
            while chunk := await reader.read(PIPE_CHUNK_BYTES):
                *lines, rest = re.split(rb"[\r\n]+", rest + chunk)
                for line in lines:
                    self._take(line)
            self._take(rest)
        finally:
            transport.close()

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self.tail.append(text if len(text) <= TAIL_LINE_CHARS else f"{text[:TAIL_LINE_CHARS]} …")
            self._sink(self.name, text)


def adopt_orphans() -> None:
    """Make this process the parent of descendants that lose theirs; for the launcher's own process, once."""
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


async def wait_for_exit(pid: int, poll_s: float = 0.25) -> None:
    """Wait until a process that is not our child has ended (a zombie has)."""
    while is_running(pid):
        await asyncio.sleep(poll_s)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    fields = _stat_fields(pid)
    return fields is not None and fields[0] not in ("Z", "X")


def session_members(session: int) -> list[int]:
    """Processes of a session, whoever their parent is now; zombies included."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if (fields := _stat_fields(pid)) is not None and int(fields[3]) == session]


async def kill_session(session: int) -> None:
    """Kill every process of a session; repeated, because one may have been starting another meanwhile.

    Raises:
        RuntimeError: some process survives SIGKILL (it hangs inside the kernel).
    """
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while members := [pid for pid in session_members(session) if is_running(pid)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {members} do not end on SIGKILL; look at them with `ps -l`")
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.02)
    # What lost its parent is our child now. A dead one stays unwaitable until the last of its threads is gone.
    while orphans := [pid for pid in session_members(session) if pid != session and _parent(pid) == os.getpid()]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"dead processes {orphans} cannot be cleared away; look at them with `ps -l`")
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        await asyncio.sleep(0.02)


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` after the name: state, parent, process group, session; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _parent(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[1])


def _end_with_parent() -> None:
    """In the child, before exec: be told to stop when the launcher is killed and cannot say so itself."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


async def _first_of(*awaitables: Coroutine[Any, Any, object], timeout_s: float) -> None:
    tasks = [asyncio.create_task(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
