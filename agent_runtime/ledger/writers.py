"""Who may write to a ledger: one process alone, or several that agreed to share it; and the numbers each gives out."""

import fcntl
import itertools
import os
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from agent_runtime.errors import LedgerError

MAX_WRITERS = 64
_WRITER_BITS = 6
_TICK_BITS = 10
"""Numbers of one writer within a millisecond: 2 to this power."""


class WriterLock:
    """The right to write to a file, until closed or the process ends, however it ends.

    ``writer`` is 0 for the only writer, and a number from 1 on, different from those of all others, for one of several.

    Raises:
        LedgerError: others write to it, and not all of them share; or there are as many as can be.
        OSError: the lock's file cannot be made.
    """

    def __init__(self, path: Path, *, shared: bool) -> None:
        self._path = path
        self._files = [_opened(f"{path}.lock")]
        try:
            if not _locked(self._files[0], fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
                raise LedgerError(
                    f"ledger {path} is being written by another process: give each its own, or set ledger_shared for "
                    "all gateways of this machine that write to it"
                )
            self.writer = self._free_place() if shared else 0
        except BaseException:
            self.close()
            raise

    def _free_place(self) -> int:
        for number in range(1, MAX_WRITERS):
            file = _opened(f"{self._path}.lock.{number}")
            if _locked(file, fcntl.LOCK_EX):
                self._files.append(file)
                return number
            os.close(file)
        raise LedgerError(f"ledger {self._path} has {MAX_WRITERS - 1} writers, and no more may: use a second file")

    @contextmanager
    def opening(self) -> Generator[None]:
        """While it lasts, no other writer is within the same block."""
        file = _opened(f"{self._path}.lock.opening")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def close(self) -> None:
        """Let others write."""
        while self._files:
            os.close(self._files.pop())


class SharedNumbers:
    """Numbers that ascend with the clock and that no other writer gives out: milliseconds, a tick, the writer.

    ``last`` is the highest number on record: those given out are above it, also when the clock was set back.
    Thread-safe.
    """

    def __init__(self, writer: int, last: int) -> None:
        self._writer = writer
        self._stamp = last >> _WRITER_BITS
        self._lock = Lock()

    def __iter__(self) -> "SharedNumbers":
        return self

    def __next__(self) -> int:
        with self._lock:
            now = time.time_ns() // 1_000_000 << _TICK_BITS
            self._stamp = max(self._stamp + 1, now)
            return self._stamp << _WRITER_BITS | self._writer


def numbers(writer: int, last: int) -> Iterator[int]:
    """The numbers that a writer gives to its steps and turns."""
    return SharedNumbers(writer, last) if writer else itertools.count(last + 1)


def writer_of(number: int) -> int:
    """Which of several writers gave out a number."""
    return number & (MAX_WRITERS - 1)


def _opened(path: str) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR, 0o600)


def _locked(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
