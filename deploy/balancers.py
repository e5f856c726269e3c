"""Balancers before two replicas: how each is started so that all requests of a session go to the same replica."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import httpx

START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 30
NAMES = ("haproxy", "smg", "sglang-router")


def command(name: str, program: str, port: int, metrics_port: int, replicas: Sequence[str]) -> list[str]:
    """The command line.

    Args:
        program: haproxy's binary; of the routers the folder that ``router_environment.sh`` made.
        replicas: base URLs of the gateways.
    """
    if name == "haproxy":
        return [program, "-db", "-f", str(Path(__file__).with_name("haproxy.cfg"))]
    python = str(Path(program) / "bin" / "python")
    common = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *replicas]
    common += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    common += ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "2"]
    common += ["--health-failure-threshold", "2", "--log-level", "warn"]
    if name == "smg":
        # The header that names a session is hashed; it does not reach the gateway.
        policy = ["--policy", "consistent_hashing", "--routing-key-headers", "x-k3-session"]
        return [python, "-m", "smg.launch_router", *policy, *common]
    # The only header it looks at is x-smg-routing-key.
    return [python, "-m", "sglang_router.launch_router", "--policy", "manual", *common]


def environment(port: int, replicas: Sequence[str]) -> dict[str, str]:
    """Variables of haproxy.cfg; the routers read none of them."""
    named = {f"K3_REPLICA_{number}": url.removeprefix("http://") for number, url in enumerate(replicas, 1)}
    return {**os.environ, "K3_BIND": f"127.0.0.1:{port}", **named}


@contextlib.contextmanager
def running(
    name: str, program: str, port: int, metrics_port: int, replicas: Sequence[str], log: Path
) -> Generator[str]:
    """The balancer's base URL once it passes requests on.

    Raises:
        SystemExit: it ended, or never found a replica; the message has the end of its log.
    """
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(name, program, port, metrics_port, replicas),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(port, replicas),
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _passes(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} does not pass requests on; the end of its log:\n{log.read_text()[-2000:]}")
            time.sleep(0.25)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _passes(url: str) -> bool:
    """Whether a request of one token is answered."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    try:
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
