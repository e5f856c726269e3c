"""Stage 5: start engine, then gateway; say ready; watch both; stop both. One exit code, no process left."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from k3_sglang.announce import read_announcements
from k3_sglang.launch.console import Console
from k3_sglang.launch.notify import STOPPING, tell_systemd
from k3_sglang.launch.processes import Child, is_running, wait_for_exit
from k3_sglang.launch.readiness import (
    EngineFacts,
    NotReady,
    engine_facts,
    loading_text,
    server_info,
    wait_until_healthy,
)

T = TypeVar("T")

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED_START = 130
LAST_WORDS_S = 3.0
"""How long the engine gets to explain itself after one of its processes is gone."""
CLOSE_S = 5.0
"""What a server gets beyond its grace: to abort what is left, to write what waits, to close its files."""
FAILURE_GRACE_S = 5.0
"""How long the other server gets to stop after one has failed."""


class ServerFailed(RuntimeError):
    """A server ended, or is of no use; the message says which and why."""


class Interrupted(Exception):
    """The user asked to stop."""


@dataclass(frozen=True)
class Program:
    """A server to run."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    health_url: str


@dataclass(frozen=True)
class Servers:
    """Both servers and what has to be true of the engine."""

    engine: Program
    gateway: Program | None
    """None where there is none: on further machines of a deployment, and beside an engine that only reads prompts."""
    engine_url: str
    announce_dir: Path
    own_model: bool
    images: bool
    device: str
    start_timeout_s: float
    stop_grace_s: float
    own_cache: bool = False
    answers: bool = True
    """Whether the engine has an HTTP server here; on further machines it only says that it is healthy."""


class Interrupts:
    """Ctrl-C, SIGTERM and SIGHUP: the first asks for an orderly stop, the second for an immediate one."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Handle the signals within the block."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


class Supervisor:
    """Runs both servers once."""

    def __init__(self, servers: Servers, console: Console) -> None:
        self._servers = servers
        self._console = console
        self._interrupts = Interrupts()
        self._children: list[Child] = []
        self._watched: dict[int, str] = {}
        """Processes of the engine below its main one, by id, with what they are."""
        self._grace_s = servers.stop_grace_s

    async def run(self, on_ready: Callable[[EngineFacts, float], None]) -> int:
        """Serve until stopped; ``on_ready(facts, seconds)`` is called once when both answer. Returns the exit code."""
        ready = False
        with self._interrupts.installed():
            try:
                facts, seconds = await self._start()
                on_ready(facts, seconds)
                ready = True
                await self._while_alive(asyncio.Event().wait(), timeout_s=None)
            except Interrupted:
                tell_systemd(STOPPING)
                self._console.progress("stopping (interrupt again to kill at once)")
            except (ServerFailed, NotReady, OSError) as error:
                self._console.error(str(error))
                self._grace_s = min(self._grace_s, FAILURE_GRACE_S)
                return EXIT_FAILED
            finally:
                await self._stop()
        return EXIT_STOPPED if ready else EXIT_INTERRUPTED_START

    async def _start(self) -> tuple[EngineFacts, float]:
        servers, started = self._servers, time.monotonic()
        self._console.progress("starting the engine")
        await self._start_program(servers.engine)
        announced = read_announcements(servers.announce_dir)
        facts = engine_facts(
            announced,
            own_model=servers.own_model,
            images=servers.images,
            device=servers.device,
            own_cache=servers.own_cache,
        )
        self._watched = engine_processes(facts, self._children[0].pid)
        if servers.answers:
            facts = replace(facts, server=await self._while_alive(server_info(servers.engine_url)))
        if servers.gateway is not None:
            self._console.progress("starting the gateway")
            await self._start_program(servers.gateway)
        return facts, time.monotonic() - started

    async def _start_program(self, program: Program) -> None:
        child = await Child.start(program.name, program.command, program.environment, self._console.server_line)
        self._children.append(child)
        healthy = wait_until_healthy(program.name, program.health_url, self._console.progress, self._loading)
        try:
            await self._while_alive(healthy, timeout_s=self._servers.start_timeout_s)
        except TimeoutError as error:
            raise ServerFailed(
                f"{program.name} was not ready after {self._servers.start_timeout_s:.0f} s; raise start_timeout_s if "
                f"it was still loading; {last_lines(child)}"
            ) from error

    def _loading(self) -> str | None:
        """What the engine says about its weights, until it is ready."""
        started = len(self._children) > 1
        return None if started else loading_text(read_announcements(self._servers.announce_dir))

    async def _while_alive(self, work: Coroutine[Any, Any, T], timeout_s: float | None = 60.0) -> T:
        """Await ``work`` unless a server ends, the user interrupts or the time is over.

        Raises:
            ServerFailed, Interrupted, TimeoutError: in these cases.
        """
        main = asyncio.create_task(work)
        guards: list[asyncio.Task[None]] = [asyncio.create_task(self._interrupted())]
        guards += [asyncio.create_task(self._ended(child)) for child in self._children]
        guards += [asyncio.create_task(self._lost(pid)) for pid in self._watched]
        try:
            done, _ = await asyncio.wait([main, *guards], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise TimeoutError
            for guard in guards:
                if guard.done():
                    guard.result()
            return main.result()
        finally:
            for task in (main, *guards):
                task.cancel()
            await asyncio.gather(main, *guards, return_exceptions=True)

    async def _interrupted(self) -> None:
        await self._interrupts.stop.wait()
        raise Interrupted

    async def _ended(self, child: Child) -> None:
        code = await child.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        raise ServerFailed(f"{child.name} {how}; {last_lines(child)}")

    async def _lost(self, pid: int) -> None:
        await wait_for_exit(pid)
        engine = self._children[0]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.wait(), LAST_WORDS_S)
        raise ServerFailed(f"the engine's {self._watched[pid]} {pid} is gone; {last_lines(engine)}")

    async def _stop(self) -> None:
        for child in reversed(self._children):  # the gateway first: it finishes its requests on a live engine
            try:
                await child.stop(self._grace_s + CLOSE_S, self._interrupts.hurry)
            except RuntimeError as error:  # something survives SIGKILL: say so, and stop the other one
                self._console.error(str(error))


def engine_processes(facts: EngineFacts, main_pid: int) -> dict[int, str]:
    """What must live as long as the engine: schedulers, and the others that announced themselves (the detokenizer)."""
    others = {pid: "worker process" for pid in facts.plugin_pids if pid != main_pid and is_running(pid)}
    return others | {pid: "scheduler process" for pid in facts.scheduler_pids}


def last_lines(child: Child) -> str:
    """The end of a server's output, for a message."""
    if not child.tail:
        return "it printed nothing"
    return "its last lines:\n" + "\n".join(f"    {line}" for line in child.tail)
