"""Kills a gateway with SIGKILL at random moments, again and again, and goes on with its sessions as a client does.

    python -m benchmarks.gateway_crash --kills 1000      # some minutes; in a checkout, for the scripted engine

The engine is scripted and answers from the prompt alone. The client streams, loses all thinking, and sends a request
again when its gateway is gone; each gateway starts with the ledger that the one before left. Whatever the moment (at
the start, before the first byte, within a turn of text or of a call, between turns while a tool runs), the engine must
see the very prompts and sampling parameters of a run that nobody kills, the ledger must pass its check, and every turn
whose end the client saw must be in it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import http.client
import json
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.ledger.reading import LedgerReader
from tests.gateway.bodies import MODEL, WEATHER_TOOL
from tests.gateway.stub_engine import Script, Step, StubEngine
from tests.gateway.vocabulary import TurnWriter, byte_tokenizer

STEPS = 6
"""Requests of a session; every other turn calls a tool."""
PAUSE_S = 0.001
TOOL_S = 0.004
SESSIONS_PER_LEDGER = 40
END_OF_MSG = 258
_ALARM = (signal.SIGALRM,)
"""Blocked but while the client waits, so that a kill is met there."""


class GatewayKilled(Exception):
    """The gateway was killed while the client waited."""


@dataclass
class Result:
    """Kills by the moment they came at; turns whose end the client saw, and those found in ledgers."""

    kills: Counter[str] = field(default_factory=Counter[str])
    sessions: int = 0
    sent_again: int = 0
    seen: int = 0
    stored: int = 0
    problems: list[str] = field(default_factory=list[str])


def listener() -> socket.socket:
    """A socket that listens on a free port, whoever serves it."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.bind(("127.0.0.1", 0))
    sock.listen(128)
    return sock


def url_of(sock: socket.socket) -> str:
    """Its base URL."""
    return f"http://127.0.0.1:{sock.getsockname()[1]}"


def forked(serve: Callable[[], None]) -> int:
    """Run `serve` in a child of this process, which has imported everything; its id."""
    child = os.fork()
    if child:
        return child
    try:
        serve()
    finally:
        os._exit(1)


def served(app: ASGIApp, sock: socket.socket) -> None:
    """Serve an application on a socket until killed."""
    uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on")).run(sockets=[sock])


def seen_digest(body: dict[str, Any]) -> str:
    """Digest of what the engine computes from: prompt ids and sampling parameters. Ids of requests are random."""
    value = json.dumps([body["input_ids"], body["sampling_params"]], sort_keys=True)
    return hashlib.blake2b(value.encode(), digest_size=12).hexdigest()


def engine_app(log: Path) -> ASGIApp:
    """An engine that thinks, speaks and calls by the prompt alone, and notes what it is asked, a line each."""
    writer = TurnWriter(byte_tokenizer())

    def plan(body: dict[str, Any]) -> Script:
        name = seen_digest(body)
        with log.open("a") as file:
            file.write(name + "\n")
        prompt = bytes(token for token in body["input_ids"] if token < 256)
        asks_again = prompt.rfind(b"user") > prompt.rfind(b"rain")
        calls = (("get_weather", (("city", "string", name), ("days", "number", "3.0"))),) if asks_again else ()
        ids = writer.turn(f"thought {name}", f"answer {name}", calls)
        steps: list[Step] = []
        for begin in range(0, len(ids), 40):
            steps += (ids[begin : begin + 40], lambda: asyncio.sleep(PAUSE_S))
        return Script(steps, {"type": "stop", "matched": END_OF_MSG})

    return StubEngine(plan).app()


class Gateway:
    """Gateway processes one after the other on one socket and one ledger, each killed when its time is up."""

    def __init__(self, settings: dict[str, Any], result: Result) -> None:
        self.settings = settings
        self.socket = listener()
        self.result = result
        self.child: int | None = None
        self.moment = "at the start"
        signal.pthread_sigmask(signal.SIG_BLOCK, _ALARM)
        signal.signal(signal.SIGALRM, self._kill)

    def ensure(self, kill_after_s: float | None) -> None:
        """Start one when none is running, and kill it after so many seconds."""
        if self.child is None:
            self.moment = "at the start"
            self.child = forked(self._serve)
            if kill_after_s is not None:
                signal.setitimer(signal.ITIMER_REAL, kill_after_s)

    def stop(self) -> None:
        """Kill it now; not counted."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.child is not None:
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
            self.child = None

    def _serve(self) -> None:
        engine = SGLangEngine(self.settings["engine_url"])
        served(create_app(GatewaySettings(**self.settings), engine, byte_tokenizer()), self.socket)

    def _kill(self, number: int, frame: FrameType | None) -> None:
        if self.child is not None:
            self.stop()
            self.result.kills[self.moment] += 1
            raise GatewayKilled


class Client:
    """One session; it sends a request again until it has seen the end of the turn."""

    def __init__(self, name: str, gateway: Gateway, result: Result) -> None:
        self.name = name
        self.gateway = gateway
        self.result = result
        self.messages: tuple[dict[str, Any], ...] = ({"role": "user", "content": f"user, session {name}"},)
        self.turns = 0

    def step(self) -> None:
        """One turn, and what the client says to it. Raises GatewayKilled; then nothing has changed."""
        if self.gateway.moment != "at the start":
            self.gateway.moment = "before the first byte"
        message = self._turn(json.dumps(self._body()))
        self.gateway.moment = "while a tool runs" if message.get("tool_calls") else "between turns"
        self.messages = (*self.messages, message, *self._following(message))
        self.turns += 1
        self.result.seen += 1
        time.sleep(TOOL_S)

    def _body(self) -> dict[str, Any]:
        # Every other session has no name, and is found by what it says.
        name = {"prompt_cache_key": self.name} if int(self.name) % 2 else {}
        return {"model": MODEL, "messages": self.messages, "tools": [WEATHER_TOOL], "stream": True, **name}

    def _following(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        calls = message.get("tool_calls", ())
        said = [{"role": "tool", "tool_call_id": call["id"], "content": f"rain {self.turns}"} for call in calls]
        return [*said, *([] if calls else [{"role": "user", "content": f"user again {self.turns}"}])]

    def _turn(self, body: str) -> dict[str, Any]:
        """The turn as this client keeps it: text and calls, no thinking."""
        host, port = self.gateway.socket.getsockname()
        connection = http.client.HTTPConnection(host, port, timeout=30)
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        try:
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for delta in _deltas(response):
                self.gateway.moment = "within a call" if delta.get("tool_calls") else "within a turn"
                message["content"] += delta.get("content") or ""
                for part in delta.get("tool_calls") or ():
                    calls = message.setdefault("tool_calls", [])
                    if part["index"] == len(calls):
                        calls.append({**part, "function": {"arguments": "", **part["function"]}})
                    else:
                        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        finally:
            connection.close()
        return message


def _deltas(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The deltas of a stream. Raises ConnectionError when it ends before its end."""
    for line in response:
        text = line.strip()
        if text == b"data: [DONE]":
            return
        if text.startswith(b"data: "):
            event = json.loads(text[6:])
            assert "error" not in event, event
            yield from (choice["delta"] for choice in event["choices"])
    raise ConnectionError("the stream ended before its end")


class Crash:
    """Sessions through gateways that are killed, beside the same sessions through one that is not."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.log = folder / "engine.txt"
        self.rng = random.Random(seed)
        self.result = Result()
        self.log.touch()
        engine = listener()
        self.engine = forked(lambda: self._engine(engine))
        self.settings = {"model": MODEL, "tokenizer_dir": folder, "context_len": 100_000, "engine_url": url_of(engine)}
        self.gateway = Gateway(self.settings, self.result)
        self.longest_s = 0.5

    def run(self, kills: int) -> Result:
        """Kill that many gateways."""
        number = 0
        while self.result.kills.total() < kills and not self.result.problems:
            ledger = self.folder / f"ledger{number}.db"
            names = [str(number + n) for n in range(SESSIONS_PER_LEDGER)]
            number += SESSIONS_PER_LEDGER
            self._ledger(ledger, names, kills)
        return self.result

    def close(self) -> None:
        """Stop what was started."""
        self.gateway.stop()
        os.kill(self.engine, signal.SIGKILL)
        os.waitpid(self.engine, 0)

    def _engine(self, sock: socket.socket) -> None:
        logging.disable()  # clients that are killed in the middle of a request are nothing to tell of
        served(engine_app(self.log), sock)

    def _ledger(self, ledger: Path, names: list[str], kills: int) -> None:
        expected = self._asked(names, self.folder / "unkilled.db")
        self.gateway.settings = {**self.settings, "ledger": ledger}
        turns = 0
        for name in names:
            if self.result.kills.total() >= kills:
                break
            asked = self._session(name, self._delay)
            self.result.sessions += 1
            turns += STEPS
            self._compare(name, expected[name], asked)
        self.gateway.stop()
        with LedgerReader(ledger) as reader:
            self.result.problems += reader.check()
            outputs = {bytes(token for token in record.ids if token < 256) for record in reader.turns()}
        if len(outputs) != turns:
            self.result.problems.append(f"{turns} turns were seen to their end, {len(outputs)} are in the ledger")
        self.result.stored += len(outputs)
        self._remove(ledger)

    def _remove(self, ledger: Path) -> None:
        for path in self.folder.glob(f"{ledger.name}*"):  # with its log, which would be taken for the next one's
            path.unlink()

    def _asked(self, names: list[str], ledger: Path) -> dict[str, list[str]]:
        """What the engine sees of sessions that nobody kills."""
        seen = self.result.seen
        self.gateway.settings = {**self.settings, "ledger": ledger}
        asked: dict[str, list[str]] = {}
        for name in names:
            started = time.monotonic()
            asked[name] = self._session(name, None)
            if name == names[0]:  # with the start
                self.longest_s = time.monotonic() - started
        self.gateway.stop()
        self._remove(ledger)
        self.result.seen = seen
        return asked

    def _session(self, name: str, delay: Callable[[], float] | None) -> list[str]:
        """Play a session to its end; what the engine was asked meanwhile."""
        before = len(self.log.read_text().split())
        client = Client(name, self.gateway, self.result)
        patience = 1.0
        while client.turns < STEPS:
            turns = client.turns
            try:
                self.gateway.ensure(None if delay is None else patience * delay())
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALARM)
                client.step()
                signal.pthread_sigmask(signal.SIG_BLOCK, _ALARM)
            except GatewayKilled:
                self.result.sent_again += 1
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, _ALARM)
            # On a busy machine none may live long enough to finish a turn.
            patience = 1.0 if client.turns > turns else patience * 1.2
        return self.log.read_text().split()[before:]

    def _delay(self) -> float:
        return self.rng.uniform(0.001, self.longest_s)

    def _compare(self, name: str, expected: list[str], asked: list[str]) -> None:
        """The prompts of the unkilled run in their order, some of them asked for again."""
        if list(dict.fromkeys(asked)) != expected:
            self.result.problems.append(f"session {name}: the engine was asked for {asked} instead of {expected}")


def crash(kills: int, seed: int = 0) -> Result:
    """Kill that many gateways and say what was found."""
    with tempfile.TemporaryDirectory() as folder:
        run = Crash(Path(folder), seed)
        try:
            return run.run(kills)
        finally:
            run.close()


def main() -> int:
    """Kill and print; exit code 1 when anything was lost, damaged or asked for in other bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that no child is left
    started = time.monotonic()
    result = crash(options.kills, options.seed)
    facts = {**vars(result), "kills": result.kills.total(), "moments": result.kills}
    print(json.dumps({**facts, "seconds": round(time.monotonic() - started)}))
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
