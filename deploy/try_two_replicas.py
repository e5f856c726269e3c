"""Two replicas behind a balancer: do sessions stick, and do they go on exactly when one replica is killed?

    python deploy/try_two_replicas.py --balancer haproxy --program /usr/sbin/haproxy
    python deploy/try_two_replicas.py --balancer smg --program FOLDER      # made by deploy/router_environment.sh

Each replica is an engine with the tiny model on the CPU and a gateway; both gateways write to one ledger. Sessions of
several turns run at the same time; their client loses all thinking, so that every turn has to come from the record.
In the middle one replica is killed (SIGKILL, gateway and engine) while it answers; clients send again what broke. Then
the ledger tells which gateway made each turn, and whether every prompt begins with the one before and its output.
Exit code 1 when a session lost anything, or did not stick while both replicas lived.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from agent_runtime.ledger.reading import LedgerReader
from agent_runtime.ledger.writers import writer_of
from k3_sglang.launch.processes import session_members

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.servers import free_ports, launched  # noqa: E402
from deploy import balancers  # noqa: E402

GIVE_UP_S = 180.0


@dataclass
class Session:
    """One client's conversation and what it saw: verdicts as the gateway told them, and what it had to send again."""

    name: str
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    verdicts: list[str] = field(default_factory=list[str])
    sent_again: int = 0
    longest_wait_s: float = 0.0

    def turn(self, http: httpx.Client, text: str, max_tokens: int) -> None:
        """One request; repeated until an answer is whole."""
        self.messages.append({"role": "user", "content": text})
        began_s = time.monotonic()
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = http.post("/v1/chat/completions", json=self._body(max_tokens), headers=self._headers())
                if answer.status_code == 200:
                    break
                if answer.status_code < 500:
                    raise SystemExit(f"{self.name}: {answer.status_code} {answer.text}")
            self.sent_again += 1
            if time.monotonic() - began_s > GIVE_UP_S:
                raise SystemExit(f"{self.name}: no answer for {GIVE_UP_S:.0f} s")
            time.sleep(0.2)
        self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - began_s)
        self.verdicts.append(answer.headers["x-k3-replay"])
        message = answer.json()["choices"][0]["message"]
        message.pop("reasoning_content", None)
        self.messages.append({key: value for key, value in message.items() if key in ("role", "content")})

    def _body(self, max_tokens: int) -> dict[str, Any]:
        # The name stands in the body too, since routers do not pass the header on.
        fixed = {"model": "tiny", "max_tokens": max_tokens}
        return {**fixed, "messages": self.messages, "prompt_cache_key": self.name}

    def _headers(self) -> dict[str, str]:
        return {"x-k3-session": self.name, "x-smg-routing-key": self.name}


def kill_replica(launcher: int) -> list[int]:
    """SIGKILL for a launcher, its gateway, its engine and all processes of these. Returns the killed."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    doomed = [launcher, *(pid for child in children for pid in session_members(int(child)))]
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return doomed


def talk(url: str, sessions: list[Session], turns: range, max_tokens: int) -> None:
    """Some turns of all sessions at the same time."""

    def one(session: Session) -> None:
        with httpx.Client(base_url=url, timeout=GIVE_UP_S, trust_env=False) as http:
            for number in turns:
                session.turn(http, f"{session.name}, request {number}: go on.", max_tokens)

    with ThreadPoolExecutor(len(sessions)) as pool:
        list(pool.map(one, sessions))


@dataclass
class Found:
    """What the ledger says of a session: the gateway of each turn in order, and prompts by what they begin with.

    ``extended`` begin with the prompt before and its output, ``broken`` should and do not; ``after_cut`` follow a turn
    that its budget ended, which is rendered from its text.
    """

    writers: list[int]
    extended: int = 0
    broken: int = 0
    after_cut: int = 0


def read(ledger: Path) -> dict[str, Found]:
    """Every session of the ledger by its name."""
    found: dict[str, Found] = {}
    with LedgerReader(ledger) as reader:
        problems = reader.check()
        if problems:
            raise SystemExit(f"the ledger is damaged: {problems}")
        for session in reader.sessions():
            outputs = {record.turn.id: record for record in reader.turns(session.id)}
            prompts = {step.id: reader.prompt_ids(step.id) for step in reader.steps(session.id)}
            seen = Found([writer_of(number) for number in sorted(outputs)])
            for step in reader.steps(session.id):
                if step.parent is None:
                    continue
                before = outputs[step.parent]
                expected = prompts[before.step] + before.ids
                if before.turn.ids is None:
                    seen.after_cut += 1
                elif prompts[step.id][: len(expected)] == expected:
                    seen.extended += 1
                else:
                    seen.broken += 1
            found[session.name.partition(":")[2]] = seen
    return found


def report(sessions: list[Session], found: dict[str, Found], before_kill: int) -> bool:
    """Print what happened. Returns whether nothing was lost."""
    verdicts = Counter(part.split(";")[0] for session in sessions for part in session.verdicts)
    lost = sum("missing=0; foreign=0" not in text for session in sessions for text in session.verdicts)
    broken = sum(found[session.name].broken for session in sessions)
    stuck = sum(len(set(found[session.name].writers[:before_kill])) == 1 for session in sessions)
    first = Counter(found[session.name].writers[0] for session in sessions)
    moved = sum(found[session.name].writers[0] != found[session.name].writers[-1] for session in sessions)
    rows = {
        "sessions": len(sessions),
        "sessions by replica at the start": dict(sorted(first.items())),
        "that stayed at one replica while both lived": stuck,
        "that went on at the other replica": moved,
        "turns": sum(len(session.verdicts) for session in sessions),
        "requests by verdict": dict(verdicts),
        "requests with a turn that was not known": lost,
        "prompts that begin with the one before and its output": sum(found[s.name].extended for s in sessions),
        "prompts that should and do not": broken,
        "prompts behind a turn that was cut": sum(found[s.name].after_cut for s in sessions),
        "requests sent again": sum(session.sent_again for session in sessions),
        "longest wait of a client": f"{max(session.longest_wait_s for session in sessions):.1f} s",
    }
    for name, value in rows.items():
        print(f"{name:62} {value}")
    return lost == broken == 0 and stuck == len(sessions)


def main() -> int:
    """Run it."""
    options = _parser().parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="k3-replicas-")))
        arguments = ["--config", str(REPOSITORY / "configs" / "tiny.yaml"), "--ledger", str(folder / "ledger.db")]
        arguments += ["--ledger-shared", "on"]
        replicas = [stack.enter_context(launched(arguments)) for _ in range(2)]
        port, metrics_port = free_ports(2)
        urls = [replica.gateway_url for replica in replicas]
        log = folder / "balancer.log"
        url = stack.enter_context(balancers.running(options.balancer, options.program, port, metrics_port, urls, log))
        sessions = [Session(f"session-{number}") for number in range(options.sessions)]
        talk(url, sessions, range(options.turns), options.max_tokens)
        killer = threading.Timer(options.kill_after_s, kill_replica, [replicas[0].pid])
        killer.start()
        talk(url, sessions, range(options.turns, 2 * options.turns), options.max_tokens)
        killer.join()
        whole = report(sessions, read(folder / "ledger.db"), options.turns)
    return 0 if whole else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--balancer", choices=balancers.NAMES, required=True)
    parser.add_argument("--program", required=True, help="haproxy's binary, or the folder of the router's environment")
    parser.add_argument("--sessions", type=int, default=8, help="conversations at the same time (default: 8)")
    parser.add_argument("--turns", type=int, default=3, help="turns before the kill, and as many from it on")
    parser.add_argument("--max-tokens", type=int, default=400, help="most output tokens of a turn (default: 400)")
    parser.add_argument("--kill-after-s", type=float, default=1.0, help="seconds into the second half (default: 1)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
