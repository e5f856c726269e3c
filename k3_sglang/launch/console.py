"""What the launcher prints: tables and the ready line on stdout, progress, server logs and errors on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from k3_sglang.launch.settings import SettingsError

Row = tuple[str, str]


class Console:
    """Writes for people; server output is prefixed with the server's name and copied to a file when asked.

    With ``as_json`` every line of standard error is a JSON object: those that a server writes as such pass unchanged,
    others become one with ``time``, ``level``, ``logger`` (the server, or ``launch``) and ``message``.
    """

    def __init__(self, log_files: dict[str, TextIO], *, as_json: bool = False) -> None:
        self._log_files = log_files
        self._as_json = as_json
        self._stderr_open = True

    def table(self, rows: Sequence[Row]) -> None:
        """Name and value per line, aligned."""
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            print(f"  {name:<{width}}  {value}")
        sys.stdout.flush()

    def ready(self, text: str) -> None:
        """The one line that starts with ``ready``; programs wait for it."""
        print(f"ready {text}", flush=True)

    def progress(self, text: str) -> None:
        """What is going on."""
        self._to_stderr(_object("launch", "info", text) if self._as_json else f"launch: {text}")

    def error(self, text: str) -> None:
        """Why it ends."""
        self._to_stderr(_object("launch", "error", text) if self._as_json else f"launch: error: {text}")

    def server_line(self, server: str, line: str) -> None:
        """One line of a server's output. A full disk or a closed pipe loses lines; it must not stop a server."""
        if self._as_json:
            self._to_stderr(line if _is_object(line) else _object(server, "info", line))
        else:
            self._to_stderr(f"{server:<7} | {line}")
        if file := self._log_files.get(server):
            try:
                print(line, file=file, flush=True)
            except OSError as error:
                del self._log_files[server]
                self.error(f"the {server}'s log file cannot be written ({error.strerror}); its copy ends here")

    def _to_stderr(self, text: str) -> None:
        """Print, unless whoever read standard error has gone (``launch 2>&1 | head``): nobody could be told."""
        if self._stderr_open:
            try:
                print(text, file=sys.stderr, flush=True)
            except OSError:
                self._stderr_open = False


def _object(logger: str, level: str, message: str) -> str:
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": time, "level": level, "logger": logger, "message": message}, ensure_ascii=False)


def _is_object(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def opened(log_dir: str | None, servers: Sequence[str], *, as_json: bool = False) -> Generator[Console]:
    """A console whose log files are open.

    Raises:
        SettingsError: the log folder cannot be written.
    """
    with ExitStack() as stack:
        files: dict[str, TextIO] = {}
        if log_dir is not None:
            try:
                Path(log_dir).expanduser().mkdir(parents=True, exist_ok=True)
                for server in servers:
                    path = Path(log_dir).expanduser() / f"{server}.log"
                    files[server] = stack.enter_context(path.open("a", encoding="utf-8"))
            except OSError as error:
                raise SettingsError(f"log_dir is {log_dir!r}: {error.strerror}; name a folder you may write") from error
        yield Console(files, as_json=as_json)
