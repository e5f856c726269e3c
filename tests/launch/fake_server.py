"""A small real server for supervisor tests: answers health checks and misbehaves as told.

Usage: fake_server.py PORT JOURNAL [WORD ...] with words

- ``announce``: announce plugin, model and pools like an engine (``foreign``: with another package's model class)
- ``images``: announce an image encoder and its processor too
- ``worker``: start a child that stands for the scheduler and makes the announcements
- ``helper``: start a child that announces the plugin only, as the detokenizer does
- ``crash``: print and exit with code 3 instead of serving
- ``mute``: never become healthy
- ``deaf``: ignore SIGTERM
- ``orphan``: start a child that sleeps, ignoring SIGTERM

Every start and every orderly stop is a line in JOURNAL.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from k3_sglang.announce import announce

MODEL = {"model_class": "k3_sglang.models.kimi_k3.K3", "device": "cpu", "dtype": "float32"}
FOREIGN = {**MODEL, "model_class": "sglang.srt.models.kimi_k3.K3"}
SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers every GET."""

    healthy = True

    def do_GET(self) -> None:
        body = json.dumps({"mamba_radix_cache_strategy": "extra_buffer"}).encode()
        self.send_response(200 if self.healthy else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """No access log."""


def announce_engine(words: set[str]) -> None:
    """What the plugin says in the engine's processes."""
    announce("plugin")
    if "images" in words:
        announce("images")
    model = FOREIGN if "foreign" in words else MODEL
    announce("model", **model, image_parameters=1234 if "images" in words else 0)
    announce(
        "pools",
        kv_tokens=100,
        state_slots=10,
        page_size=1,
        kv_bytes=2048,
        state_bytes_per_slot=1536,
        max_running_requests=2,
    )


def main() -> None:
    """Serve until SIGTERM."""
    port, journal, words = int(sys.argv[1]), Path(sys.argv[2]), set(sys.argv[3:])
    if "is-worker" in words or "is-helper" in words:
        if "is-worker" in words:
            announce_engine(words)
        else:
            announce("plugin")
        print("announced", flush=True)
        time.sleep(600)
    name = os.environ["FAKE_NAME"]

    def note(event: str) -> None:
        with journal.open("a", encoding="utf-8") as file:
            file.write(f"{name} {event}\n")

    def stop(_number: int, _frame: FrameType | None) -> None:
        note("stopped")
        os._exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in words else stop)
    note(f"started {os.getpid()}")
    print(f"{name} says hello", flush=True)
    if "crash" in words:
        print("about to fail\rfor a reason", flush=True)
        sys.exit(3)
    if "orphan" in words:
        note(f"child {subprocess.Popen([sys.executable, '-c', SLEEPER]).pid}")
    for child in {"worker", "helper"} & words:
        command = [sys.executable, __file__, str(port), str(journal), f"is-{child}"]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert worker.stdout is not None
        worker.stdout.readline()  # it has announced itself
        note(f"child {worker.pid}")
    if "announce" in words:
        announce_engine(words)
    Handler.healthy = "mute" not in words
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
