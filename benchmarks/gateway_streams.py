"""Many streams at once through a gateway process: none sees another's text, and broken ones leave nothing running.

    python -m benchmarks.gateway_streams                            # 300 streams, a storm of 300; scripted engine
    python -m benchmarks.gateway_streams --engine http://127.0.0.1:30001 --streams 32 --storm 32

Gateway, engine and clients are processes of their own. Every stream asks with a nonce of its own, in one of three
protocols and with the key of one of three owners. The scripted engine repeats the nonce: each stream must have its own
and no other; a real engine (a checkpoint of a K3 beside it, on this machine) only must not show another's. In the storm
clients break off at random moments. Then nothing may run in the engine, and no place be taken in the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.gateway.bodies import MODEL, chat
from tests.gateway.process import COMMAND, vocabulary_files
from tests.gateway.stub_engine import Script, Step, StubEngine
from tests.gateway.vocabulary import TurnWriter, byte_tokenizer

END_OF_MSG = 258
PIECES = 40
"""Events of one stream of the scripted engine."""
PAUSE_S = 0.025
OWNERS = {secrets.token_hex(16): name for name in ("ann", "bob", "carl")}
NONCE = re.compile(r"nonce[0-9a-f]{16}")
FIRST = re.compile(rb'"(?:reasoning_content|content|text|thinking|delta)": ?"[^"]')
SETTLE_S = 30.0
"""How long what was broken off may take to end."""
MAX_TOKENS = 64


@dataclass
class Stream:
    """What one client saw: times in seconds from its start, None when it did not come so far."""

    nonce: str
    first_s: float | None = None
    total_s: float | None = None
    problems: list[str] = field(default_factory=list[str])


def scripted_engine(port: int) -> None:
    """Serve an engine that repeats the nonce of its prompt, slowly, and tells how many requests run."""
    writer = TurnWriter(byte_tokenizer())

    def plan(body: dict[str, Any]) -> Script:
        found = NONCE.search(bytes(token for token in body["input_ids"] if token < 256).decode())
        nonce = found[0] if found else "none"
        ids = writer.turn(f"I was told {nonce}. " * 2, f"{nonce} " * 8)
        size = max(1, len(ids) // PIECES)
        steps: list[Step] = []
        for begin in range(0, len(ids), size):
            steps += (ids[begin : begin + size], lambda: asyncio.sleep(PAUSE_S))
        return Script(steps, {"type": "stop", "matched": END_OF_MSG})

    engine = StubEngine(plan, incremental=True)
    app = engine.app()

    async def running(request: Request) -> Response:
        seen = {"running": len(engine.running), "asked": len(engine.requests), "aborted": len(engine.aborts)}
        return JSONResponse(seen)

    app.router.routes.append(Route("/running", running))
    uvicorn.run(app, port=port, log_config=None, access_log=False, backlog=4096)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def process(command: list[str], url: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers at a URL; stopped in the end."""
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as server:
        try:
            for _ in range(600):
                with contextlib.suppress(httpx.TransportError):
                    httpx.get(url, trust_env=False)
                    break
                if server.poll() is not None:
                    assert server.stderr is not None
                    raise SystemExit(f"{command[2]} ended: {server.stderr.read().decode()[-2000:]}")
                time.sleep(0.1)
            yield server
        finally:
            server.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def gateway(folder: Path, settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """A gateway with three owners of keys: its URL and process id."""
    port = free_port()
    file = folder / "gateway.json"
    file.write_text(json.dumps({**settings, "port": port, "api_keys_env": "GATEWAY_KEYS"}))
    keys = "\n".join(f"{name}:{key}" for key, name in OWNERS.items())
    environment = {**os.environ, "GATEWAY_KEYS": keys}
    url = f"http://127.0.0.1:{port}"
    command = [*COMMAND, "--settings", str(file), "--log-level", "error"]
    with process(command, f"{url}/health", environment) as server:
        yield url, server.pid


def request_of(number: int, nonce: str, model: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a stream in one of the protocols."""
    text = f"My word is {nonce}. Say it."
    if number % 3 == 0:
        return "/v1/chat/completions", {**chat(text, model=model), "stream": True, "max_tokens": MAX_TOKENS * 8}
    if number % 3 == 1:
        messages = [{"role": "user", "content": text}]
        return "/v1/messages", {
            "model": model,
            "messages": messages,
            "stream": True,
            "max_tokens": MAX_TOKENS * 8,
        }
    return "/v1/responses", {"model": model, "input": text, "stream": True, "max_output_tokens": MAX_TOKENS * 8}


async def read(
    client: httpx.AsyncClient, number: int, model: str, *, short: bool, expect: bool, breaks_s: float | None = None
) -> Stream:
    """One stream, whole or broken off after some seconds."""
    stream = Stream(f"nonce{secrets.token_hex(8)}")
    path, body = request_of(number, stream.nonce, model)
    if short:
        body["max_output_tokens" if "input" in body else "max_tokens"] = MAX_TOKENS
    key = list(OWNERS)[number // 3 % len(OWNERS)]
    began_s = time.monotonic()
    received = bytearray()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(breaks_s):
            async with client.stream("POST", path, json=body, headers={"x-api-key": key}) as response:
                if response.status_code != 200:
                    stream.problems.append(f"{response.status_code} {(await response.aread())[:200]!r}")
                    return stream
                async for piece in response.aiter_bytes():
                    received += piece
                    if stream.first_s is None and FIRST.search(received):
                        stream.first_s = time.monotonic() - began_s
            stream.total_s = time.monotonic() - began_s
    check(stream, received.decode(), expect=expect)
    return stream


def check(stream: Stream, text: str, *, expect: bool) -> None:
    """Note what is wrong with what a client received."""
    others = set(NONCE.findall(text)) - {stream.nonce}
    if others:
        stream.problems.append(f"the stream of {stream.nonce} shows {sorted(others)}")
    if stream.total_s is None:
        return
    if not re.search(r"\[DONE\]|message_stop|response\.(completed|incomplete)", text):
        stream.problems.append(f"the stream of {stream.nonce} has no end: {text[-200:]!r}")
    # Cut into events, a nonce may be whole nowhere; all that was said, put together, has it eight times and twice.
    said = "".join(re.findall(r'"(?:reasoning_content|content|text|thinking|delta)": ?"([^"]*)"', text))
    if expect and said.count(stream.nonce) < 10:
        stream.problems.append(f"the stream of {stream.nonce} shows its nonce {said.count(stream.nonce)} times, not 10")
    if set(NONCE.findall(said)) - {stream.nonce}:
        stream.problems.append(f"what {stream.nonce} was told holds another's nonce")


async def slots(client: httpx.AsyncClient) -> int:
    """Requests that run or wait in the gateway."""
    taken = 0
    for key in OWNERS:
        state = (await client.get("/v1/k3/limits", headers={"x-api-key": key})).json()["generating"]
        taken += state["running"] + state["waiting"]
    return taken


async def engine_running(engine_url: str, *, scripted: bool) -> int:
    """Requests that run or wait in the engine."""
    async with httpx.AsyncClient(base_url=engine_url, trust_env=False, timeout=30) as client:
        if scripted:
            return (await client.get("/running")).json()["running"]
        loads = (await client.get("/v1/loads")).json()["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


async def settled(client: httpx.AsyncClient, engine_url: str, *, scripted: bool) -> dict[str, Any]:
    """What is left when all clients have gone, and after how many seconds it is nothing."""
    began_s = time.monotonic()
    while True:
        left = {"engine": await engine_running(engine_url, scripted=scripted), "slots": await slots(client)}
        waited_s = time.monotonic() - began_s
        if not any(left.values()) or waited_s > SETTLE_S:
            return {**left, "after_s": round(waited_s, 2)}
        await asyncio.sleep(0.05)


def times(streams: list[Stream]) -> dict[str, dict[str, float]]:
    """Percentiles in milliseconds."""
    table: dict[str, dict[str, float]] = {}
    for name in ("first", "total"):
        values = sorted(value for s in streams if (value := getattr(s, f"{name}_s")) is not None)
        if values:
            at = {f"p{q}": values[min(len(values) - 1, len(values) * q // 100)] for q in (50, 95, 99)}
            table[f"{name}_ms"] = {key: round(1000 * value) for key, value in at.items()}
    return table


def memory(pid: int) -> dict[str, int]:
    """Resident memory of a process in MiB, and its open files."""
    status = Path(f"/proc/{pid}/status").read_text()
    rss = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert rss is not None
    return {"rss_mib": int(rss[1]) // 1024, "files": len(list(Path(f"/proc/{pid}/fd").iterdir()))}


async def measure(options: argparse.Namespace, url: str, pid: int, engine_url: str, model: str) -> dict[str, Any]:
    """Run the streams, then the storm."""
    scripted = options.engine is None
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    mode = {"short": not scripted, "expect": scripted}
    draw = random.Random(options.seed)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=300, limits=limits) as client:
        alone = [await read(client, number, model, **mode) for number in range(3)]
        before = memory(pid)
        streams = await asyncio.gather(*(read(client, number, model, **mode) for number in range(options.streams)))
        after = memory(pid)
        left = await settled(client, engine_url, scripted=scripted)
        longest_s = max((stream.total_s or 0.0 for stream in streams), default=0.0)
        moments = [draw.uniform(0, longest_s) for _ in range(options.storm)]
        storm = await asyncio.gather(
            *(read(client, number, model, breaks_s=moment, **mode) for number, moment in enumerate(moments))
        )
        left_of_storm = await settled(client, engine_url, scripted=scripted)
        again = [await read(client, number, model, **mode) for number in range(3)]
        end = memory(pid)
    problems = [problem for stream in (*alone, *streams, *storm, *again) for problem in stream.problems]
    return {
        "streams": len(streams),
        "alone": times(alone),
        "together": times(streams),
        "gateway": {"before": before, "after_streams": after, "after_storm": end},
        "left": left,
        "storm": {
            "streams": len(storm),
            "broken_before_first": sum(stream.first_s is None for stream in storm),
            "broken_in_the_middle": sum(stream.first_s is not None and stream.total_s is None for stream in storm),
            "ended": sum(stream.total_s is not None for stream in storm),
            "left": left_of_storm,
        },
        "problems": len(problems),
        "first_problems": problems[:5],
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start what is needed, measure, stop it."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        if options.engine is None:
            vocabulary_files(folder)
            port = free_port()
            engine_url, model = f"http://127.0.0.1:{port}", MODEL
            command = [sys.executable, "-m", "benchmarks.gateway_streams", "--serve-scripted-engine", str(port)]
            stack.enter_context(process(command, f"{engine_url}/ready", dict(os.environ)))
            settings: dict[str, Any] = {"tokenizer_dir": str(folder), "context_len": 100_000}
        else:
            engine_url = options.engine
            info = httpx.get(f"{engine_url}/server_info", trust_env=False, timeout=30).json()
            model = info["served_model_name"]
            settings = {"tokenizer_dir": info["model_path"], "context_len": info["context_length"]}
            settings["constrained_by_default"] = options.constrain
        settings |= {"model": model, "engine_url": engine_url}
        url, pid = stack.enter_context(gateway(folder, settings))
        return asyncio.run(measure(options, url, pid, engine_url, model))


def main() -> int:
    """The facts as JSON; 1 when a stream was not as it should be or something was left running."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--storm", type=int, default=300, help="streams that are broken off at random moments")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (%(default)s)")
    parser.add_argument("--engine", metavar="URL", help="a real engine of this machine in the scripted one's place")
    parser.add_argument("--no-constrain", dest="constrain", action="store_false", help="with --engine: trained weights")
    parser.add_argument("--serve-scripted-engine", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_scripted_engine is not None:
        scripted_engine(options.serve_scripted_engine)
        return 0
    facts = run(options)
    print(json.dumps(facts, indent=2))
    left = [facts["left"], facts["storm"]["left"]]
    return int(facts["problems"] > 0 or any(one["engine"] or one["slots"] for one in left))


if __name__ == "__main__":
    sys.exit(main())
