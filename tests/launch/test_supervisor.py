"""Stage 5 with real processes: ready, stop, crash, deafness, orphans; never a process left behind."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from k3_sglang.announce import DIRECTORY_VARIABLE
from k3_sglang.launch.console import Console
from k3_sglang.launch.processes import is_running, session_members
from k3_sglang.launch.readiness import EngineFacts
from k3_sglang.launch.supervisor import Program, Servers, Supervisor

FAKE_SERVER = Path(__file__).with_name("fake_server.py")
OnReady = Callable[[EngineFacts, float], None]


class Scene:
    """Two fake servers, a supervisor for them, and what happened."""

    def __init__(self, folder: Path, free_port: Callable[[], int]) -> None:
        self.folder = folder
        self.journal_file = folder / "journal"
        self.announce_dir = folder / "announcements"
        self.announce_dir.mkdir()
        self._free_port = free_port
        self.facts: EngineFacts | None = None

    def servers(
        self, engine: str, gateway: str = "", grace_s: float = 20, start_timeout_s: float = 30, *, images: bool = False
    ) -> Servers:
        """Servers that behave as the words say (see ``fake_server.py``)."""
        engine_program = self._program("engine", engine)
        return Servers(
            engine=engine_program,
            gateway=self._program("gateway", gateway),
            engine_url=engine_program.health_url.removesuffix("/health"),
            announce_dir=self.announce_dir,
            own_model=True,
            images=images,
            device="cpu",
            start_timeout_s=start_timeout_s,
            stop_grace_s=grace_s,
        )

    def _program(self, name: str, words: str) -> Program:
        port = self._free_port()
        command = [sys.executable, str(FAKE_SERVER), str(port), str(self.journal_file), *words.split()]
        environment = {**os.environ, "FAKE_NAME": name, DIRECTORY_VARIABLE: str(self.announce_dir)}
        return Program(name, command, environment, f"http://127.0.0.1:{port}/health")

    async def run(self, servers: Servers, on_ready: Callable[[], None] = lambda: None) -> int:
        """Supervise to the end and check that nothing is left."""

        def ready(facts: EngineFacts, _seconds: float) -> None:
            self.facts = facts
            on_ready()

        code = await Supervisor(servers, Console({})).run(ready)
        for pid in self.pids("started"):
            assert [member for member in session_members(pid) if is_running(member)] == []
        assert not any(is_running(pid) for pid in self.pids("child"))
        return code

    def journal(self) -> list[str]:
        """Events of both servers, in order."""
        return self.journal_file.read_text(encoding="utf-8").splitlines() if self.journal_file.exists() else []

    def events(self) -> list[str]:
        """The journal without process ids."""
        return [" ".join(line.split()[:2]) for line in self.journal()]

    def pids(self, event: str) -> list[int]:
        """Process ids noted with an event."""
        return [int(line.split()[2]) for line in self.journal() if line.split()[1] == event]


@pytest.fixture
def scene(tmp_path: Path, free_port: Callable[[], int]) -> Scene:
    return Scene(tmp_path, free_port)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


async def test_the_gateway_starts_after_the_engine_and_stops_before_it(scene: Scene) -> None:
    assert await scene.run(scene.servers("announce"), on_ready=interrupt) == 0
    assert scene.events() == ["engine started", "gateway started", "gateway stopped", "engine stopped"]


async def test_ready_comes_with_the_facts_the_engine_announced(scene: Scene) -> None:
    await scene.run(scene.servers("announce"), on_ready=interrupt)
    assert scene.facts is not None
    assert scene.facts.pools["kv_tokens"] == 100
    assert scene.facts.server["mamba_radix_cache_strategy"] == "extra_buffer"
    assert scene.facts.scheduler_pids == tuple(scene.pids("started")[:1])


async def test_a_further_machine_of_a_deployment_runs_an_engine_alone(scene: Scene) -> None:
    servers = replace(scene.servers("announce"), gateway=None, answers=False)
    assert await scene.run(servers, on_ready=interrupt) == 0
    assert scene.events() == ["engine started", "engine stopped"]
    assert scene.facts is not None and scene.facts.server == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_other_stop_signals_work_like_ctrl_c(scene: Scene, number: signal.Signals) -> None:
    assert await scene.run(scene.servers("announce"), on_ready=lambda: os.kill(os.getpid(), number)) == 0
    assert scene.events()[-1] == "engine stopped"


async def test_an_engine_that_crashes_at_start_is_reported_with_its_last_lines(
    scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    assert await scene.run(scene.servers("crash")) == 1
    message = capfd.readouterr().err.partition("launch: error: ")[2]
    assert message.splitlines()[:4] == [
        "engine exited with code 3; its last lines:",
        "    engine says hello",
        "    about to fail",
        "    for a reason",
    ]
    assert scene.events() == ["engine started"]


async def test_a_gateway_that_crashes_at_start_takes_the_engine_with_it(
    scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    assert await scene.run(scene.servers("announce", "crash")) == 1
    assert "gateway exited with code 3" in capfd.readouterr().err
    assert scene.events()[-1] == "engine stopped"


async def test_a_gateway_killed_while_serving_ends_the_launch(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    def kill_gateway() -> None:
        os.kill(scene.pids("started")[1], signal.SIGKILL)

    assert await scene.run(scene.servers("announce"), on_ready=kill_gateway) == 1
    assert "gateway was killed by SIGKILL" in capfd.readouterr().err


async def test_a_killed_scheduler_ends_the_launch_even_if_the_engine_does_not_notice(
    scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    def kill_scheduler() -> None:
        os.kill(scene.pids("child")[0], signal.SIGKILL)

    assert await scene.run(scene.servers("worker"), on_ready=kill_scheduler) == 1
    assert f"scheduler process {scene.pids('child')[0]} is gone" in capfd.readouterr().err
    assert scene.events()[-2:] == ["gateway stopped", "engine stopped"]


async def test_a_dead_helper_of_a_living_engine_ends_the_launch(
    scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    def kill_helper() -> None:
        os.kill(scene.pids("child")[0], signal.SIGKILL)

    assert await scene.run(scene.servers("announce helper"), on_ready=kill_helper) == 1
    assert f"worker process {scene.pids('child')[0]} is gone" in capfd.readouterr().err


async def test_a_killed_engine_leaves_no_orphan(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    def kill_engine() -> None:
        os.kill(scene.pids("started")[0], signal.SIGKILL)

    assert await scene.run(scene.servers("announce orphan"), on_ready=kill_engine) == 1
    assert "engine was killed by SIGKILL" in capfd.readouterr().err


async def test_a_second_interrupt_kills_at_once(scene: Scene) -> None:
    loop = asyncio.get_running_loop()

    def twice() -> None:
        interrupt()
        loop.call_later(0.2, interrupt)

    started = loop.time()
    assert await scene.run(scene.servers("announce deaf orphan", "deaf", grace_s=100), on_ready=twice) == 0
    assert loop.time() - started < 60
    assert not any(event.endswith("stopped") for event in scene.events())


async def test_a_deaf_engine_is_killed_after_the_grace_time(scene: Scene) -> None:
    assert await scene.run(scene.servers("announce deaf", grace_s=0.2), on_ready=interrupt) == 0
    assert scene.events()[-1] == "gateway stopped"


async def test_an_interrupt_while_starting_stops_everything(scene: Scene) -> None:
    run = asyncio.create_task(scene.run(scene.servers("mute")))
    while not scene.journal():
        await asyncio.sleep(0.02)
    interrupt()
    assert await run == 130
    assert scene.events() == ["engine started", "engine stopped"]


async def test_an_engine_that_never_answers_is_given_up(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    assert await scene.run(scene.servers("mute", start_timeout_s=1)) == 1
    assert "engine was not ready after 1 s; raise start_timeout_s" in capfd.readouterr().err


async def test_a_silent_plugin_is_never_ready(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    assert await scene.run(scene.servers("")) == 1
    assert "no engine process announced 'plugin'" in capfd.readouterr().err
    assert scene.facts is None


async def test_a_cache_that_did_not_announce_itself_is_never_ready(
    scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    servers = replace(scene.servers("announce"), own_cache=True)
    assert await scene.run(servers) == 1
    assert "no engine process announced 'cache'" in capfd.readouterr().err


async def test_a_foreign_model_class_is_never_ready(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    assert await scene.run(scene.servers("announce foreign")) == 1
    assert "engine serves sglang.srt.models.kimi_k3.K3, expected a class of k3_sglang" in capfd.readouterr().err


async def test_an_engine_that_says_it_serves_pictures_is_ready(scene: Scene) -> None:
    assert await scene.run(scene.servers("announce images", images=True), on_ready=interrupt) == 0


async def test_an_engine_that_shall_serve_pictures_and_does_not_say_so_is_never_ready(
    scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    assert await scene.run(scene.servers("announce", images=True)) == 1
    assert "no engine process announced 'images'" in capfd.readouterr().err


async def test_an_image_encoder_where_none_is_expected_is_never_ready(
    scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    assert await scene.run(scene.servers("announce images")) == 1
    assert "engine loaded an image encoder of 1234 parameters, expected none" in capfd.readouterr().err


async def test_a_program_that_cannot_be_started_is_reported(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    servers = scene.servers("announce")
    missing = Program("engine", ["no-such-program"], os.environ, servers.engine.health_url)
    assert await Supervisor(replace(servers, engine=missing), Console({})).run(print) == 1
    assert "no-such-program" in capfd.readouterr().err


def test_servers_are_stopped_when_the_launcher_itself_is_killed(scene: Scene) -> None:
    code = (
        "import asyncio, pickle, sys\n"
        "from k3_sglang.launch.console import Console\n"
        "from k3_sglang.launch.supervisor import Supervisor\n"
        "servers = pickle.load(open(sys.argv[1], 'rb'))\n"
        "ready = lambda facts, seconds: print('serving', flush=True)\n"
        "asyncio.run(Supervisor(servers, Console({})).run(ready))\n"
    )
    pickled = scene.folder / "servers"
    pickled.write_bytes(pickle.dumps(scene.servers("announce")))
    with subprocess.Popen([sys.executable, "-c", code, str(pickled)], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "serving\n"
        launcher.kill()
    wait_for(lambda: not any(is_running(pid) for pid in scene.pids("started")))
    assert sorted(scene.events()[-2:]) == ["engine stopped", "gateway stopped"]


def test_a_launcher_that_adopts_orphans_leaves_no_zombie(scene: Scene) -> None:
    code = (
        "import asyncio, os, signal, sys\n"
        "from k3_sglang.launch.processes import Child, adopt_orphans, session_members\n"
        "async def main():\n"
        "    adopt_orphans()\n"
        "    started = asyncio.Event()\n"
        '    sleepers = \'import subprocess, sys; [subprocess.Popen(["sleep", "600"]) for _ in range(3)];\'\n'
        "    script = sleepers + 'print(1, flush=True); sys.stdin.read(); import time; time.sleep(600)'\n"
        "    command = [sys.executable, '-c', script]\n"
        "    child = await Child.start('parent', command, os.environ, lambda name, line: started.set())\n"
        "    await started.wait()\n"
        "    assert len(session_members(child.pid)) == 4\n"
        "    os.kill(child.pid, signal.SIGKILL)\n"
        "    await child.wait()\n"
        "    await child.stop(1, asyncio.Event())\n"
        "    print(session_members(child.pid))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def wait_for(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    """Poll processes that are nobody's children here, so no event tells of their end."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "still not true"
        time.sleep(0.02)
