"""A real headless Chromium, driven over the pipe of its DevTools protocol: pages as people see them."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--no-default-browser-check", "--mute-audio", "--remote-debugging-pipe", "--hide-scrollbars",
)  # fmt: skip
LAUNCH = (
    "import os, sys; from fcntl import F_DUPFD, fcntl\n"
    "read, write = (fcntl(int(number), F_DUPFD, 10) for number in sys.argv[1:3])\n"
    "os.dup2(read, 3); os.dup2(write, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Chromium takes commands from descriptor 3 and answers on 4; here these may be anything."""
ANSWER_S = 90.0


def program() -> str | None:
    """Path of a Chromium on this machine, None without one."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser did not do what it was asked."""


class Page:
    """The one tab of a browser. Messages of its console and of its content policy are in ``complaints``."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._pending = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[str] = []
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        return answer.get("result", {})

    def open(self, url: str) -> None:
        """Load a page, scripts and style sheets included."""
        self._events.clear()
        failed = self.send("Page.navigate", url=url).get("errorText")
        if failed:
            raise BrowserError(f"{url}: {failed}")
        while "Page.loadEventFired" not in self._events:
            self._note(self._receive())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Wait until an expression is true, and return it."""
        end_s = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            if time.monotonic() > end_s:
                raise BrowserError(f"not true within {timeout_s} s: {expression}")
            time.sleep(0.1)
        return value

    def size(self, width: int, height: int, *, dark: bool = False, scripts: bool = True) -> None:
        """The window, the colour scheme its user prefers, and whether scripts run."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Emulation.setScriptExecutionDisabled", value=not scripts)

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def point(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """Write what is in sight, or the whole page, as PNG."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            if not select.select([self._read], [], [], ANSWER_S)[0]:
                raise BrowserError(f"the browser said nothing for {ANSWER_S} s")
            piece = os.read(self._read, 1 << 16)
            if not piece:
                raise BrowserError("the browser has ended")
            self._pending += piece
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        method = message.get("method", "")
        self._events.append(method)
        if method == "Log.entryAdded":
            self.complaints.append(message["params"]["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(message["params"]["exceptionDetails"]))


@contextmanager
def browser() -> Iterator[Page]:
    """A browser with a profile of its own; it and all its processes are gone afterwards."""
    path = program()
    assert path is not None, "ask program() first"
    ours_read, theirs_write = os.pipe()
    theirs_read, ours_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [sys.executable, "-c", LAUNCH, str(theirs_read), str(theirs_write), path, *FLAGS]
        process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}"],
            pass_fds=(theirs_read, theirs_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_read)
        os.close(theirs_write)
        try:
            yield Page(ours_write, ours_read)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(ANSWER_S)
            os.close(ours_read)
            os.close(ours_write)
