"""Where shell commands run: as the agent's user, or in a sandbox that sees one directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from agent_runtime.errors import AgentRuntimeError

_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_CONFIGURATION: Final = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl", "/etc/ca-certificates")
_NETWORK: Final = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf")


class SandboxUnavailable(AgentRuntimeError):
    """The program that makes the sandbox is missing. Commands are never run without it instead."""


class Sandbox(Protocol):
    """Wraps the command line of a shell command."""

    def wrap(self, arguments: Sequence[str], directory: Path) -> list[str]:
        """The command line that runs `arguments` in `directory`, confined."""
        ...


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """Namespaces of the kernel through the program `bwrap`.

    A command sees the working directory (writable), the system's programs and libraries (read-only), an empty /tmp and
    nothing else; no network unless allowed; every process it starts dies with it, those in sessions of their own too.
    """

    network: bool = False
    readable: Sequence[str] = ()
    """Further paths it may read, for example a virtual environment."""
    program: str = "bwrap"

    def __post_init__(self) -> None:
        """
        Raises:
            SandboxUnavailable: the program is not installed.
        """
        if shutil.which(self.program) is None:
            raise SandboxUnavailable(
                f"{self.program!r} is not installed; install the package bubblewrap, or run the whole agent in a "
                "container and make the shell tool without a sandbox"
            )

    def wrap(self, arguments: Sequence[str], directory: Path) -> list[str]:
        options = ["--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]
        options += ["--tmpfs", "/tmp"]
        shown = [*_SYSTEM, *_CONFIGURATION, *self.readable]
        if self.network:
            options.append("--share-net")
            shown += _NETWORK
        for path in shown:
            if os.path.islink(path) and path in _SYSTEM:
                options += ["--symlink", os.readlink(path), path]
            else:
                options += ["--ro-bind-try", path, path]
        place = str(directory)
        return [self.program, *options, "--bind", place, place, "--chdir", place, "--", *arguments]
