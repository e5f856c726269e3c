"""SIGTERM for the launcher while the real engine generates: the stream ends whole, then gateway and engine stop."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import httpx

from tests.engine.conftest import two_free_ports
from tests.engine.stack import STOP_TIMEOUT_S, configuration, start
from tests.gateway.bodies import chat, streamed

MAX_TOKENS = 600


def test_a_running_stream_ends_whole_and_systemd_and_the_log_are_told(repository: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(5)
        arguments = [*configuration(repository), "--log-format", "json", "--log-level", "info"]
        stack = start(arguments, *two_free_ports(), {"NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert systemd.recv(100) == b"READY=1"
        with httpx.Client(base_url=stack.gateway_url, timeout=120, trust_env=False) as http:
            body = streamed(chat("Hello", model="tiny", max_tokens=MAX_TOKENS, temperature=0))
            with http.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                os.kill(stack.process.pid, signal.SIGTERM)
                assert systemd.recv(100) == b"STOPPING=1"
                refused = http.post("/v1/chat/completions", json=chat(model="tiny"))
                seen = list(lines)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert seen[-2] == "data: [DONE]" and not any('"error"' in line for line in seen)
        assert stack.process.wait(STOP_TIMEOUT_S) == 0
        assert stack.pump is not None
        stack.pump.join(STOP_TIMEOUT_S)
    logged = [json.loads(line) for line in stack.output if line.startswith("{")]
    (completion,) = (line for line in logged if "prompt_tokens" in line)
    assert completion["outcome"] == "done" and completion["output_tokens"] > 1
    plain = [line for line in stack.output if not line.startswith(("{", "  ", "ready "))]
    assert plain == [], "standard error holds JSON objects only"
