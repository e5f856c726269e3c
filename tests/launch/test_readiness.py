"""Waiting for a server: the lines of progress say what it is at."""

from __future__ import annotations

import asyncio
import http.server
import re
import threading
from collections.abc import Iterator

import pytest

from k3_sglang.announce import LOADING, Announcement
from k3_sglang.launch import readiness
from k3_sglang.launch.readiness import loading_text, wait_until_healthy


def rank(done: int) -> Announcement:
    """A scheduler that has read ``done`` of its tensors."""
    details = {"text": f"loading weights {done} % ({done}/100 tensors, 0.1 GB)", "done": done, "total": 100}
    return Announcement(LOADING, done, 0.0, details)


def test_the_slowest_rank_speaks_for_all() -> None:
    assert loading_text([]) is None
    assert loading_text([Announcement("plugin", 1, 0.0, {})]) is None
    assert loading_text([rank(37), rank(12), rank(99)]) == "loading weights 12 % (12/100 tensors, 0.1 GB)"


class Handler(http.server.BaseHTTPRequestHandler):
    """Healthy from the third question on."""

    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(200 if self.asked > 2 else 503)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """No access log."""


@pytest.fixture
def url() -> Iterator[str]:
    """A server that is not healthy at first."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/health"
        server.shutdown()
        thread.join()


def test_lines_of_progress_say_what_the_server_is_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "PROGRESS_EVERY_S", 0.0)
    lines: list[str] = []
    doing = iter([None, "loading weights 37 % (412/1,103 tensors, 1.2 GB)"])
    asyncio.run(wait_until_healthy("engine", url, lines.append, lambda: next(doing)))
    assert [re.sub(r"\d+ s so far", "N s so far", line) for line in lines] == [
        "waiting for the engine, N s so far",
        "waiting for the engine, N s so far: loading weights 37 % (412/1,103 tensors, 1.2 GB)",
    ]
