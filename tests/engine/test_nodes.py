"""A deployment on two machines: two launchers with one rank each, here on one machine, serve as one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.engine.conftest import two_free_ports
from tests.engine.stack import start, stop

pytestmark = pytest.mark.timeout(900)

SIZES = ["--kv-tokens", "8192", "--state-slots", "24", "--max-running-requests", "2", "--log-level", "warning"]


def test_two_launchers_serve_one_model_and_only_the_first_has_a_gateway() -> None:
    meet, _ = two_free_ports()
    arguments = ["--model", "tiny", "--device", "cpu", "--tp", "2", "--nodes", "2", *SIZES]
    arguments += ["--dist-init-addr", f"127.0.0.1:{meet}"]
    with ThreadPoolExecutor(2) as pool:
        ports = [two_free_ports() for _ in range(2)]
        running = [pool.submit(start, [*arguments, "--node-rank", str(rank)], *ports[rank]) for rank in range(2)]
        first, second = (each.result() for each in running)
    try:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        answer = httpx.post(f"{first.gateway_url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == httpx.codes.OK
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert any(line.startswith("ready") and "node=1/2" in line for line in second.output)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{second.gateway_url}/health")
    finally:
        codes = [stop(stack) for stack in (first, second)]
    # Without the first machine's engine that of the second ends too, before or after it is asked to stop.
    assert codes[0] == 0
    assert codes[1] in (0, 1)
