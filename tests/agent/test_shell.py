"""Commands end, however they behave, and nothing of them is left behind."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.conversation import ToolCall
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.result import Failure, ToolResult
from agent_runtime.tools.shell import ShellSettings, shell_tool

Run = Callable[..., Any]


@pytest.fixture
def registry(tmp_path: Path) -> ToolRegistry:
    settings = ShellSettings(output_bytes=1000, max_output_bytes=200_000)
    return ToolRegistry([shell_tool(tmp_path, settings)])


async def run(registry: ToolRegistry, command: str, **more: Any) -> ToolResult:
    return await registry.execute(ToolCall("id", "run_command", json.dumps({"command": command, **more})))


def alive(pid_file: Path) -> bool:
    """Whether the process whose id is in the file still runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid_file.read_text().strip()}/stat").read_text()
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] not in "ZX"


async def gone(pid_file: Path) -> bool:
    for _ in range(200):
        if not alive(pid_file):
            return True
        await asyncio.sleep(0.01)
    return False


async def test_output_error_stream_and_exit_code_are_returned(registry: ToolRegistry, tmp_path: Path) -> None:
    result = await run(registry, "echo out; echo err >&2; pwd; exit 3")
    assert result.model == f"out\nerr\n{tmp_path}\n[exit code 3]"
    assert result.ok and result.user.startswith("exit code 3")


async def test_a_command_sees_a_minimal_environment_and_an_empty_input(
    registry: ToolRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_API_KEY", "do-not-leak")
    result = await run(registry, "env; cat; echo end")
    names = {line.partition("=")[0] for line in result.model.splitlines() if "=" in line}
    assert names <= {"PATH", "HOME", "LANG", "TERM", "PWD", "SHLVL", "_", "OLDPWD"}
    assert "do-not-leak" not in result.model and result.model.endswith("end\n[exit code 0]")


async def test_a_command_over_its_time_is_ended_with_all_its_children(registry: ToolRegistry, tmp_path: Path) -> None:
    result = await run(registry, "sleep 300 & echo $! > child; echo started; wait", timeout_s=1)
    assert result.failure is Failure.TIMEOUT
    assert result.model == "started\n[stopped after 1 s; give timeout_s to allow more]"
    assert await gone(tmp_path / "child")


async def test_a_command_that_ignores_the_polite_signal_is_killed(registry: ToolRegistry, tmp_path: Path) -> None:
    result = await run(registry, "trap '' TERM; echo $$ > self; while :; do sleep 0.2; done", timeout_s=1)
    assert result.failure is Failure.TIMEOUT and await gone(tmp_path / "self")


async def test_a_killed_child_is_reported_with_its_signal(registry: ToolRegistry) -> None:
    assert (await run(registry, "echo before; kill -9 $$")).model == "before\n[killed by SIGKILL]"


async def test_an_end_by_a_signal_without_a_name_is_told_by_its_number(registry: ToolRegistry) -> None:
    result = await run(registry, f"kill -{signal.SIGRTMIN + 3} $$")
    assert result.ok and f"killed by signal {signal.SIGRTMIN + 3}" in result.model


async def test_runaway_output_ends_the_command_and_keeps_head_and_tail(registry: ToolRegistry) -> None:
    result = await run(registry, "echo first; yes runaway")
    assert result.failure is Failure.REFUSED
    assert result.model.startswith("first\nrunaway\n") and "bytes omitted ...]" in result.model
    assert "stopped after writing more than 200000 bytes" in result.model
    assert len(result.model) < 1300


async def test_long_output_below_the_limit_is_cut_with_an_exact_count(registry: ToolRegistry) -> None:
    result = await run(registry, "printf 'a%.0s' $(seq 1 700); printf 'z%.0s' $(seq 1 700)")
    assert result.model == "a" * 500 + "\n[... 400 bytes omitted ...]\n" + "z" * 500 + "\n[exit code 0]"


async def test_background_processes_do_not_hold_up_the_answer_and_are_ended(
    registry: ToolRegistry, tmp_path: Path
) -> None:
    result = await run(registry, "sleep 300 & echo $! > child; echo done")
    assert result.model == "done\n[exit code 0]\n[processes left in the background were ended]"
    assert await gone(tmp_path / "child")


async def test_a_background_process_in_a_group_of_its_own_is_ended_too(registry: ToolRegistry, tmp_path: Path) -> None:
    """Job control puts every job into its own group, so killing the command's group is not enough."""
    (tmp_path / "job.py").write_text(
        "import os, time\nos.setpgid(0, 0)\nwith open('new', 'w') as file:\n    file.write(str(os.getpid()))\n"
        "os.rename('new', 'pid')\ntime.sleep(60)\n"
    )
    command = f"{sys.executable} job.py >/dev/null 2>&1 & while [ ! -e pid ]; do sleep 0.02; done"
    assert (await run(registry, command)).ok
    assert await gone(tmp_path / "pid")


async def test_a_process_that_left_its_group_does_not_hold_up_the_answer(
    registry: ToolRegistry, tmp_path: Path
) -> None:
    """Leaving the group is possible, as the tool's documentation says: it is no sandbox."""
    result = await run(registry, "setsid sh -c 'echo $$ > escaped; exec sleep 300' & sleep 0.2; echo done")
    escaped = tmp_path / "escaped"
    try:
        assert result.ok and "done" in result.model and alive(escaped)
    finally:
        os.kill(int(escaped.read_text()), signal.SIGKILL)


async def test_cancelling_the_call_kills_the_group(registry: ToolRegistry, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ready")
    command = "sleep 300 & echo $! > child; echo $$ > self; echo go > ready; wait"
    task = asyncio.create_task(run(registry, command))
    assert await asyncio.to_thread((tmp_path / "ready").read_text) == "go\n"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gone(tmp_path / "child") and await gone(tmp_path / "self")


async def test_bytes_that_are_no_text_do_not_break_the_result(registry: ToolRegistry) -> None:
    result = await run(registry, r"printf '\377\376ok'")
    assert result.model == "\ufffd\ufffdok\n[exit code 0]"


async def test_a_nul_character_is_refused(registry: ToolRegistry) -> None:
    assert (await run(registry, "echo a\0b")).failure is Failure.REFUSED


async def test_a_directory_that_vanished_is_a_failure_and_not_an_exception(tmp_path: Path) -> None:
    root = tmp_path / "gone"
    root.mkdir()
    registry = ToolRegistry([shell_tool(root)])
    root.rmdir()
    result = await run(registry, "true")
    assert result.failure is Failure.CRASHED and "FileNotFoundError" in result.model


async def test_many_commands_leave_no_descriptor_open(registry: ToolRegistry) -> None:
    await run(registry, "true")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        await run(registry, "echo x")
    assert len(os.listdir("/proc/self/fd")) <= before
