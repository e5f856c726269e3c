"""Append-only storage of a run log: one JSON object a line, safe against kill -9 at any byte."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeAlias, cast

from agent_runtime.errors import AgentRuntimeError

Entry: TypeAlias = dict[str, Any]


class RunLogError(AgentRuntimeError):
    """A run log cannot be read, written or continued; the message says where and what to do."""


class RunStore(Protocol):
    """Where a run log lives. Entries are only ever added; each is on its way to disk when `append` returns."""

    def append(self, entry: Entry) -> None:
        """Add one entry, whole or not at all."""
        ...

    def entries(self) -> Sequence[Entry]:
        """All entries so far, oldest first."""
        ...


class MemoryRunStore:
    """A run log that ends with the process."""

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self._entries = list(entries)

    def append(self, entry: Entry) -> None:
        self._entries.append(entry)

    def entries(self) -> Sequence[Entry]:
        return self._entries


class FileRunStore:
    """A run log in a file of JSON lines, with one writer at a time.

    A line is written by one call to the system and counts once its newline is there. A process that is killed leaves
    whole lines and at most a piece of one, which is cut off when the file is opened again. With `sync` every entry is
    on the disk before the next thing happens, which also survives a loss of power.
    """

    def __init__(self, path: str | os.PathLike[str], *, sync: bool = False) -> None:
        """
        Raises:
            RunLogError: another process writes to the file, or a whole line is not a JSON object.
        """
        self.path = Path(path)
        self._sync = sync
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._lock()
            self._entries, whole_bytes = _read(self.path)
            os.ftruncate(self._file, whole_bytes)
        except BaseException:
            os.close(self._file)
            raise
        self._size = whole_bytes

    def __enter__(self) -> FileRunStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, entry: Entry) -> None:
        """
        Raises:
            OSError: the disk is full or gone; nothing of the entry stays.
        """
        line = json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
            if self._sync:
                os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)
        self._entries.append(entry)

    def entries(self) -> Sequence[Entry]:
        return self._entries

    def close(self) -> None:
        """Let another process write; the entries stay readable here."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunLogError(
                f"{self.path} is being written by another process; end that one, or use another file"
            ) from error


def read_run_log(path: str | os.PathLike[str]) -> list[Entry]:
    """The entries of a file, without the right to write; a piece of a last line is left out.

    Raises:
        RunLogError: a whole line is not a JSON object.
        OSError: the file cannot be read.
    """
    return _read(Path(path))[0]


def _read(path: Path) -> tuple[list[Entry], int]:
    """The entries, and how many bytes they take."""
    raw = path.read_bytes()
    whole_bytes = raw.rfind(b"\n") + 1
    entries: list[Entry] = []
    for number, line in enumerate(raw[:whole_bytes].split(b"\n")[:-1], start=1):
        try:
            value: Any = json.loads(line.decode("utf-8", "surrogatepass"))
        except ValueError as error:
            raise RunLogError(
                f"{path}, line {number} is damaged ({error}); it was not written by this program. "
                "Keep the file, and go on with a copy that ends before that line"
            ) from error
        if not isinstance(value, dict) or "kind" not in value:
            raise RunLogError(f"{path}, line {number} is no entry of a run log: it needs to be an object with a kind")
        entries.append(cast(Entry, value))
    return entries, whole_bytes
