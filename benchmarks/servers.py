"""A server for a benchmark: the launcher on free ports, its log at hand, always stopped."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

STOP_TIMEOUT_S = 60


@dataclass
class Server:
    """A launch that is ready."""

    engine_url: str
    gateway_url: str
    pid: int = 0
    """Of the launcher."""
    lines: list[str] = field(default_factory=list)
    """What it has printed so far."""

    def line_with(self, text: str) -> str:
        """The first line that holds a text.

        Raises:
            SystemExit: there is none.
        """
        for line in self.lines:
            if text in line:
                return line
        raise SystemExit(f"the server never said {text!r}; its last lines:\n" + "\n".join(self.lines[-20:]))


def free_ports(count: int) -> list[int]:
    """Different ports of the loopback interface on which nobody listened a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def launched(arguments: Sequence[str]) -> Iterator[Server]:
    """Start ``python -m k3_sglang.launch`` and wait for its ready line.

    Raises:
        SystemExit: it ended before.
    """
    ports = free_ports(2)
    command = [sys.executable, "-m", "k3_sglang.launch", *arguments]
    command += ["--engine-port", str(ports[0]), "--port", str(ports[1])]
    server = Server(f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}")
    ready = threading.Event()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    server.pid = process.pid

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line.rstrip())
            if line.startswith("ready"):
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        ready.wait()
        if process.poll() is not None or not any(line.startswith("ready") for line in server.lines):
            raise SystemExit("the server ended before it was ready:\n" + "\n".join(server.lines[-20:]))
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_TIMEOUT_S)
        reader.join(STOP_TIMEOUT_S)
