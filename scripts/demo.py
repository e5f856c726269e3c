"""The demo: serve the tiny model, let the coding agent work against it, stop everything, say how long it took."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import IO

REPOSITORY = Path(__file__).resolve().parent.parent
SERVER_LOG = REPOSITORY / ".build" / "demo.log"
START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 60
LAST_LINES = 20
AGENT_ARGUMENTS = ["--max-output-tokens", "400", "--temperature", "0"]
"""Greedy, so that the demo is the same everywhere; a turn of the tiny model is below 300 tokens."""


class DemoFailed(Exception):
    """The message says what failed and shows the end of the server's log."""


def say(text: str) -> None:
    """One line of the demo itself."""
    print(f"demo: {text}", flush=True)


@contextlib.contextmanager
def serving(arguments: list[str]) -> Generator[str]:
    """A running server; yields its base URL and stops it in every case.

    Raises:
        DemoFailed: it did not become ready.
    """
    SERVER_LOG.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "k3_sglang.launch", "--config", "configs/tiny.yaml", "--port", "0", *arguments]
    with SERVER_LOG.open("w", encoding="utf-8") as log:
        server = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C reaches only this script, which then stops the server in order
        )
        try:
            yield wait_until_ready(server)
        finally:
            stop(server)


def wait_until_ready(server: subprocess.Popen[str]) -> str:
    """Show the server's table until its ``ready`` line; returns the base URL in it.

    Raises:
        DemoFailed: the server ended, or was not ready in time.
    """
    output: IO[str] | None = server.stdout
    assert output is not None
    timer = threading.Timer(START_TIMEOUT_S, server.terminate)
    timer.start()
    try:
        for line in output:
            print(line, end="", flush=True)
            if line.startswith("ready "):
                return line.split()[1]
    finally:
        timer.cancel()
    code = server.wait(STOP_TIMEOUT_S)
    tail = "\n".join(SERVER_LOG.read_text(encoding="utf-8").splitlines()[-LAST_LINES:])
    raise DemoFailed(f"the server ended with exit code {code} before it was ready; end of {SERVER_LOG}:\n{tail}")


def stop(server: subprocess.Popen[str]) -> None:
    """Stop the server in order; when it does not, at once."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # a second SIGTERM makes it kill what it started
        if server.poll() is None:
            server.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(STOP_TIMEOUT_S)
    if server.stdout is not None:
        server.stdout.close()


def run_agent(base_url: str) -> None:
    """Run the example and show its table.

    Raises:
        DemoFailed: the example failed.
    """
    command = [sys.executable, "examples/coding_agent.py", "--base-url", base_url, *AGENT_ARGUMENTS]
    code = subprocess.run(command, cwd=REPOSITORY, check=False).returncode
    if code != 0:
        raise DemoFailed(f"examples/coding_agent.py ended with exit code {code}; the server's log is {SERVER_LOG}")


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """Every way to ask for a stop ends in the same clean-up."""
    raise KeyboardInterrupt


def main(arguments: list[str]) -> int:
    """Run the demo; arguments go to the launcher. 0 when everything worked, 1 when not, 130 when interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    started = time.monotonic()
    try:
        say("a trained K3 of three million parameters repairs a small program; watch the cached column grow")
        say(f"starting engine and gateway (log: {SERVER_LOG})")
        with serving(arguments) as base_url:
            ready = time.monotonic()
            run_agent(base_url)
            finished = time.monotonic()
            say("stopping the server")
        ended = time.monotonic()
    except DemoFailed as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the server is stopped")
        return 130
    say(
        f"done in {ended - started:.1f} s: start {ready - started:.1f} s, agent {finished - ready:.1f} s, "
        f"stop {ended - finished:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
