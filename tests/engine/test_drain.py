"""SIGTERM for the launcher while the real engine generates: the stream ends whole, then gateway and engine stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import httpx

from tests.engine.conftest import two_free_ports
from tests.engine.stack import STOP_TIMEOUT_S, Stack, configuration, start
from tests.gateway.bodies import chat, streamed

MAX_TOKENS = 600


def test_a_running_stream_ends_whole_and_systemd_and_the_log_are_told(repository: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(5)
        arguments = [*configuration(repository), "--log-format", "json", "--log-level", "info"]
        stack = start(arguments, *two_free_ports(), {"NOTIFY_SOCKET": str(tmp_path / "notify")})
        try:
            refused, seen = stopped_while_streaming(stack, systemd)
            assert stack.process.wait(STOP_TIMEOUT_S) == 0
        finally:
            if stack.process.poll() is None:
                stack.process.kill()
                stack.process.wait()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert seen[-2] == "data: [DONE]" and not any('"error"' in line for line in seen)
        assert stack.pump is not None
        stack.pump.join(STOP_TIMEOUT_S)
    logged = [json.loads(line) for line in stack.output if line.startswith("{")]
    (completion,) = (line for line in logged if line.get("output_tokens", 0) > 1)
    assert completion["outcome"] == "done"
    plain = [line for line in stack.output if not line.startswith(("{", "  ", "ready "))]
    assert plain == [], "standard error holds JSON objects only"


def stopped_while_streaming(stack: Stack, systemd: socket.socket) -> tuple[httpx.Response, list[str]]:
    """What a request gets once the gateway has heard of the end, which is soon, not at once, and the whole stream."""
    assert systemd.recv(100) == b"READY=1"
    with httpx.Client(base_url=stack.gateway_url, timeout=120, trust_env=False) as http:
        body = streamed(chat("Hello", model="tiny", max_tokens=MAX_TOKENS, temperature=0))
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(stack.process.pid, signal.SIGTERM)
            assert systemd.recv(100) == b"STOPPING=1"
            for _ in range(50):
                refused = http.post("/v1/chat/completions", json=chat(model="tiny", max_tokens=1))
                if refused.status_code != httpx.codes.OK:
                    break
                time.sleep(0.02)
            return refused, list(lines)
