"""The sandbox of shell commands: what it is told, and what a command can do in it where it is installed."""

import asyncio
import contextlib
import shutil
import time
from pathlib import Path

import pytest

from agent_runtime.conversation import ToolCall
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.sandbox import Bubblewrap, SandboxUnavailable
from agent_runtime.tools.shell import ShellSettings, shell_tool


def works() -> bool:
    """Whether bubblewrap is here and the kernel lets it make namespaces."""
    if shutil.which("bwrap") is None:
        return False

    async def probe() -> bool:
        command = Bubblewrap().wrap(["true"], Path("/usr"))
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        return await process.wait() == 0

    return asyncio.run(probe())


needs_bubblewrap = pytest.mark.skipif(not works(), reason="bubblewrap is not installed or may not make namespaces here")


def test_without_the_program_there_is_an_error_and_no_unconfined_command() -> None:
    with pytest.raises(SandboxUnavailable, match="'no-such-bwrap' is not installed; install the package bubblewrap"):
        Bubblewrap(program="no-such-bwrap")


def test_a_command_is_wrapped_without_network_and_with_one_writable_directory(tmp_path: Path) -> None:
    wrapped = Bubblewrap(program="sh", readable=["/opt/venv"]).wrap(["/bin/sh", "-c", "ls"], tmp_path)
    assert wrapped[0] == "sh" and wrapped[-4:] == ["--", "/bin/sh", "-c", "ls"]
    assert "--unshare-all" in wrapped and "--die-with-parent" in wrapped and "--share-net" not in wrapped
    writable = [wrapped[n + 1] for n, word in enumerate(wrapped) if word == "--bind"]
    assert writable == [str(tmp_path)] and "/opt/venv" in wrapped
    assert "--share-net" in Bubblewrap(network=True, program="sh").wrap(["ls"], tmp_path)


async def test_the_shell_tool_runs_what_the_sandbox_makes_of_a_command(tmp_path: Path) -> None:
    class Echo:
        def wrap(self, arguments: object, directory: Path) -> list[str]:
            return ["/bin/echo", "wrapped", str(arguments), str(directory)]

    registry = ToolRegistry([shell_tool(tmp_path, ShellSettings(sandbox=Echo()))])
    result = await registry.execute(ToolCall("c", "run_command", '{"command": "ls"}'))
    assert result.model.startswith(f"wrapped ['/bin/sh', '-c', 'ls'] {tmp_path}")


@needs_bubblewrap
async def test_a_confined_command_sees_its_directory_and_not_the_users_files(tmp_path: Path) -> None:
    (tmp_path / "inside").write_text("mine")
    registry = ToolRegistry([shell_tool(tmp_path, ShellSettings(sandbox=Bubblewrap()))])
    result = await registry.execute(
        ToolCall("c", "run_command", '{"command": "cat inside; ls /etc/passwd; echo x > new; ls /home"}')
    )
    assert "mine" in result.model and "No such file" in result.model
    assert (tmp_path / "new").read_text() == "x\n"


@needs_bubblewrap
async def test_a_confined_command_has_no_network_and_leaves_no_process(tmp_path: Path) -> None:
    registry = ToolRegistry([shell_tool(tmp_path, ShellSettings(sandbox=Bubblewrap()))])
    command = "cat /proc/net/dev | grep -c :; setsid sleep 4711 & echo started"
    result = await registry.execute(ToolCall("c", "run_command", f'{{"command": "{command}"}}'))
    assert "started" in result.model and result.model.splitlines()[0] == "1", "the loopback device alone"
    deadline = time.monotonic() + 10
    while any("sleep\x004711" in text for text in _command_lines()):
        assert time.monotonic() < deadline, "a process in a session of its own outlived its command"
        await asyncio.sleep(0.05)


def _command_lines() -> list[str]:
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text())
    return found
