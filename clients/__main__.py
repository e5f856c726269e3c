"""Run real agent clients against the gateway, and against SGLang without it; print the matrix and write it to files.

    make clients                                    # all of them; the first time they are installed (3 GB)
    make clients ARGS="--only anthropic --only 'openai, stream'"
    make clients ARGS="--model DIR"                 # trained weights instead of the tiny random ones

Each client runs in its own pinned environment and a scratch home, and reaches nothing but this machine. What a cell
says was read off the wire by a recorder between client and server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from clients.catalog import CLIENTS, Client, chosen
from clients.environments import EnvironmentProblem, install
from clients.matrix import Row, Seen, markdown, seen
from clients.recorder import Fence, Recorder, fenced, recording
from clients.runner import Target, run, version
from clients.servers import Server, running, serving
from clients.wire import steps

REPOSITORY = Path(__file__).resolve().parent.parent
MAX_TOKENS = 400
"""More than the longest turn that untrained weights can write under the gateway's grammar."""
PLAIN_MAX_TOKENS = 64
PLAIN_TIMEOUT_S = 240
"""Without that grammar untrained weights write until they are stopped."""
OUT = REPOSITORY / ".build" / "clients"


def say(text: str) -> None:
    """Progress goes to stderr; stdout is the matrix."""
    print(f"clients: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Bench:
    """The two servers behind their recorders, and the fence; each with its URL."""

    server: Server
    gateway: tuple[Recorder, str]
    engine: tuple[Recorder, str]
    fence: tuple[Fence, str]
    slow: int
    """Factor on every time limit."""

    def meet(self, client: Client, environment: Path, with_gateway: bool) -> Seen:
        """Run one client against one of the servers, with the engine's cache empty."""
        recorder, url = self.gateway if with_gateway else self.engine
        httpx.post(f"{self.server.engine_url}/flush_cache", trust_env=False, timeout=60)
        recorder.take()
        fence, proxy = self.fence
        fence.take()
        server, tokens = self.server, MAX_TOKENS if with_gateway else PLAIN_MAX_TOKENS
        target = Target(url, server.model if with_gateway else server.engine_model, tokens)
        timeout_s = self.slow * (client.timeout_s if with_gateway else PLAIN_TIMEOUT_S)
        outcome = run(client, environment, target, proxy, timeout_s)
        return seen(outcome, steps(recorder.take()), fence.take())

    def row(self, client: Client, compare: bool) -> Row:
        """Everything about one client."""
        try:
            environment = install(client.environment)
        except EnvironmentProblem as problem:
            return Row(client, "?", None, None, str(problem))
        before = self.meet(client, environment, with_gateway=True)
        plain = self.meet(client, environment, with_gateway=False) if compare else None
        return Row(client, version(client, environment), before, plain)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m clients", description=__doc__, formatter_class=_RAW)
    parser.add_argument("--model", default="tiny-random", help="'tiny-random', 'tiny' or the directory of a checkpoint")
    parser.add_argument("--servers", nargs=2, metavar=("GATEWAY", "ENGINE"), help="URLs of servers that already run")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a client by name; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the names of all clients and stop")
    parser.add_argument("--slow", type=int, default=1, metavar="N", help="multiply all time limits, on a busy machine")
    parser.add_argument("--no-compare", action="store_true", help="leave SGLang without the gateway out")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="folder of matrix.md and matrix.json")
    return parser.parse_args()


_RAW = argparse.RawDescriptionHelpFormatter


def main() -> int:
    """0 when every client that could be installed worked with the gateway, 1 when one did not, 2 for a wrong name."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # every way to ask for a stop stops the client and the servers
        signal.signal(number, signal.default_int_handler)
    options = arguments()
    if options.list:
        print("\n".join(client.name for client in CLIENTS))
        return 0
    try:
        clients = chosen(options.only)
    except ValueError as problem:
        say(str(problem))
        return 2
    rows: list[Row] = []
    options.out.mkdir(parents=True, exist_ok=True)
    for environment in dict.fromkeys(client.environment for client in clients):
        try:
            install(environment)
        except EnvironmentProblem as problem:
            say(str(problem))
    with (
        servers(options) as server,
        recording(server.gateway_url) as gateway,
        recording(server.engine_url) as engine,
        fenced() as fence,
    ):
        bench = Bench(server, gateway, engine, fence, options.slow)
        for client in clients:
            started = time.monotonic()
            rows.append(bench.row(client, not options.no_compare))
            say(f"{' | '.join(rows[-1].cells())} ({time.monotonic() - started:.0f} s)")
            write(rows, options.out)
    print((options.out / "matrix.md").read_text(encoding="utf-8"), end="")
    return 0 if all(row.gateway is None or (row.gateway.connects and row.gateway.tools) for row in rows) else 1


def servers(options: argparse.Namespace) -> contextlib.AbstractContextManager[Server]:
    """Those that run, or new ones."""
    if options.servers:
        return contextlib.nullcontext(running(*options.servers))
    return serving(options.model, options.out / "server.log")


def write(rows: list[Row], folder: Path) -> None:
    """Both files, after every client: an interrupted run leaves what it has seen, and so do runs of single clients."""
    file = folder / "matrix.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    found = {row["client"]: row for row in [*before, *(row.json() for row in rows)]}
    merged = [found[client.name] for client in CLIENTS if client.name in found]
    file.write_text(json.dumps(merged, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "matrix.md").write_text(markdown(merged), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
