"""Commands in containers: what podman or docker is told, and that no container outlives its command."""

import asyncio
import contextlib
import json
import os
import stat
from pathlib import Path

import pytest

from agent_runtime.conversation import ToolCall
from agent_runtime.tools.container import Container
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.result import Failure
from agent_runtime.tools.sandbox import SandboxUnavailable
from agent_runtime.tools.shell import ShellSettings, shell_tool

FAKE = """#!/bin/sh
# Runs the command apart from its client, as a container is; `kill` ends it by its name.
here=$(dirname "$0")
echo "$@" >> "$here/log"
if [ "$1" = kill ]; then kill -9 -"$(cat "$here/$2")"; exit; fi
name=$3
while [ "$1" != image ]; do shift; done
shift
setsid "$@" &
echo $! > "$here/$name"
wait $!
"""


@pytest.fixture
def podman(tmp_path: Path) -> Path:
    """A program that understands `run` and `kill`, and notes what it is told in a file `log` beside it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "podman"
    program.write_text(FAKE)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def call(command: str, timeout_s: int = 60) -> ToolCall:
    """A call of the shell tool."""
    return ToolCall("c", "run_command", json.dumps({"command": command, "timeout_s": timeout_s}))


def told(podman: Path) -> list[list[str]]:
    """Command lines the program was given."""
    return [line.split() for line in (podman.parent / "log").read_text().splitlines()]


def group_of(podman: Path, name: str) -> int:
    """Process group of a container."""
    return int((podman.parent / name).read_text())


def is_running(group: int) -> bool:
    """Whether a process of a group is left; one that only waits to be reaped is not."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, found = path.read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state != "Z":
                return True
    return False


def test_without_the_program_there_is_an_error_and_no_unconfined_command() -> None:
    with pytest.raises(SandboxUnavailable, match="'no-such-podman' is not installed; install podman or docker"):
        Container("image", program="no-such-podman")


def test_a_container_has_no_network_a_read_only_root_and_one_writable_directory(podman: Path, work: Path) -> None:
    container = Container("image", str(podman), memory="1g", pids=64, environment={"KEY": "value"})
    command = container.wrap(["/bin/sh", "-c", "ls -l"], work)
    assert command[:3] == [str(podman), "run", "--name"]
    assert command[-4:] == ["image", "/bin/sh", "-c", "ls -l"]
    expected = {
        "--rm", "--pull=never", "--read-only", "--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges",
        "--pids-limit=64", "--memory=1g", f"--user={os.stat(work).st_uid}:{os.stat(work).st_gid}",
        f"--mount=type=bind,source={work},destination={work}", f"--workdir={work}", "--env=KEY=value",
    }  # fmt: skip
    assert expected <= set(command)
    assert [word for word in command if word.startswith("--mount")] == [
        f"--mount=type=bind,source={work},destination={work}"
    ]
    assert container.wrap(["ls"], work)[3] != command[3], "each has a name of its own"
    assert "--network=none" not in Container("image", str(podman), network=True).wrap(["ls"], work)


def test_a_directory_that_no_mount_can_name_is_refused(podman: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has a comma or a quote"):
        Container("image", str(podman)).wrap(["ls"], tmp_path / "a,b")


def test_an_environment_that_would_not_reach_the_command_is_refused(podman: Path, work: Path) -> None:
    settings = ShellSettings(environment={"KEY": "value"}, sandbox=Container("image", str(podman)))
    with pytest.raises(ValueError, match=r"\['KEY'\] would not reach commands in a container"):
        shell_tool(work, settings)


async def test_a_command_that_ends_is_not_killed(podman: Path, work: Path) -> None:
    registry = ToolRegistry([shell_tool(work, ShellSettings(sandbox=Container("image", str(podman))))])
    result = await registry.execute(call("echo hello; exit 3"))
    assert result.model == "hello\n[exit code 3]"
    assert [line[0] for line in told(podman)] == ["run"]


async def test_at_the_time_limit_the_container_is_killed_by_its_name(podman: Path, work: Path) -> None:
    registry = ToolRegistry([shell_tool(work, ShellSettings(sandbox=Container("image", str(podman))))])
    result = await registry.execute(call("echo begun; sleep 600", timeout_s=1))
    assert result.failure is Failure.TIMEOUT and result.model.startswith("begun\n[stopped after 1 s")
    run, kill = told(podman)
    assert kill == ["kill", run[2]]
    assert not is_running(group_of(podman, run[2]))


async def test_at_the_output_limit_the_container_is_killed_by_its_name(podman: Path, work: Path) -> None:
    settings = ShellSettings(max_output_bytes=100_000, sandbox=Container("image", str(podman)))
    result = await ToolRegistry([shell_tool(work, settings)]).execute(call("yes"))
    assert "stopped after writing more than 100000 bytes" in result.model and len(result.model) < 40_000
    run, kill = told(podman)
    assert kill == ["kill", run[2]]
    assert not is_running(group_of(podman, run[2]))


async def test_a_cancelled_call_kills_its_container(podman: Path, work: Path) -> None:
    registry = ToolRegistry([shell_tool(work, ShellSettings(sandbox=Container("image", str(podman))))])
    os.mkfifo(work / "begun")
    task = asyncio.ensure_future(registry.execute(call("echo > begun; sleep 600")))
    await asyncio.to_thread((work / "begun").read_text)
    task.cancel()
    await asyncio.wait([task])
    log, name = podman.parent / "log", told(podman)[0][2]
    async with asyncio.timeout(20):
        while "kill" not in log.read_text() or is_running(group_of(podman, name)):
            await asyncio.sleep(0.02)
