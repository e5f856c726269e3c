"""Shell tool: one command in its own process group, with a time limit, an output limit and a clean end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from agent_runtime.tools.container import Container
from agent_runtime.tools.process import Finished, run_in_group
from agent_runtime.tools.registry import Tool, tool
from agent_runtime.tools.result import Failure, ToolResult
from agent_runtime.tools.sandbox import Sandbox

_MAX_TIMEOUT_S: Final = 600
# On top of the command's own limit: ending the group and collecting its output takes a moment.
_CLEANUP_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ShellSettings:
    """Limits and environment of commands."""

    output_bytes: int = 30_000
    """Bytes of output the model sees: the first and the last half of it."""
    max_output_bytes: int = 16 * 1024 * 1024
    """A command that has written more than this is ended."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Added to the minimal environment (PATH, HOME, LANG, TERM); nothing else of ours reaches a command."""
    sandbox: Sandbox | None = None
    """What confines commands; None runs them as the agent's user."""


def shell_tool(root: str | PathLike[str], settings: ShellSettings | None = None) -> Tool:
    """The tool `run_command`, which starts commands in `root`.

    Without a sandbox the root is where a command starts, not where it must stay: a command can read and
    change whatever the operating system lets this user read and change, reach the network, and leave its
    process group. Run the whole agent in a container or a virtual machine when its commands are not trusted.

    Raises:
        NotADirectoryError: `root` is not an existing directory.
        ValueError: an environment is set that the sandbox does not hand on.
    """
    directory = Path(root).resolve()
    if not directory.is_dir():
        raise NotADirectoryError(f"tool root {str(root)!r} is not a directory; create it first")
    chosen = settings or ShellSettings()
    if isinstance(chosen.sandbox, Container) and chosen.environment:
        raise ValueError(
            f"environment {sorted(chosen.environment)} would not reach commands in a container; "
            "give it as Container(environment=...)"
        )

    async def run_command(
        command: Annotated[str, Field(description="Command line for /bin/sh.", min_length=1)],
        timeout_s: Annotated[int, Field(ge=1, le=_MAX_TIMEOUT_S, description="Seconds it may run.")] = 60,
    ) -> ToolResult:
        """Run a shell command in the working directory and return its exit code and output.

        Standard input is empty. Processes left running in the background are ended when the command ends.
        """
        if "\0" in command:
            return ToolResult("The command contains a NUL character; nothing was run.", failure=Failure.REFUSED)
        finished = await _run(["/bin/sh", "-c", command], directory, timeout_s, chosen)
        return _as_result(finished, timeout_s, chosen)

    return tool(timeout_s=_MAX_TIMEOUT_S + _CLEANUP_S, parallel=False)(run_command)


async def _run(arguments: list[str], directory: Path, timeout_s: float, settings: ShellSettings) -> Finished:
    sandbox = settings.sandbox
    container = sandbox if isinstance(sandbox, Container) else None
    command = arguments if sandbox is None else sandbox.wrap(arguments, directory)
    ending: threading.Thread | None = None
    whole = False
    try:
        finished = await run_in_group(
            command,
            directory=directory,
            # A container's client needs the settings of its user; the command does not get them.
            environment=os.environ if container else _environment(directory, settings.environment),
            timeout_s=timeout_s,
            keep_bytes=settings.output_bytes,
            max_bytes=settings.max_output_bytes,
        )
        whole = finished.stopped_by is None
    finally:
        if container is not None and not whole:
            # On a thread that is waited for unless the call is cancelled.
            ending = threading.Thread(target=container.end, args=(command,), name="end-container")
            ending.start()
    if ending is not None:
        await asyncio.to_thread(ending.join)
    return finished


def _environment(directory: Path, extra: Mapping[str, str]) -> dict[str, str]:
    minimal = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(directory),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }
    return {**minimal, **extra}


def _as_result(finished: Finished, timeout_s: int, settings: ShellSettings) -> ToolResult:
    ended = _ending(finished, timeout_s, settings)
    parts = [finished.output.rstrip("\n"), f"[{ended}]"]
    if finished.left_behind:
        parts.append("[processes left in the background were ended]")
    failure = Failure.TIMEOUT if finished.stopped_by == "timeout" else None
    if finished.stopped_by == "output":
        failure = Failure.REFUSED
    return ToolResult("\n".join(part for part in parts if part), f"{ended}, {finished.seconds:.1f} s", failure=failure)


def _ending(finished: Finished, timeout_s: int, settings: ShellSettings) -> str:
    if finished.stopped_by == "timeout":
        return f"stopped after {timeout_s} s; give timeout_s to allow more"
    if finished.stopped_by == "output":
        limit = settings.max_output_bytes
        return f"stopped after writing more than {limit} bytes; redirect the output to a file"
    if finished.exit_code < 0:
        return f"killed by {_signal_name(-finished.exit_code)}"
    return f"exit code {finished.exit_code}"


def _signal_name(number: int) -> str:
    """Name of a signal; most of the real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
