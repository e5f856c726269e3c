"""Shell commands in containers of podman or docker: one container a command, removed with it."""

from __future__ import annotations

import logging
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import geteuid
from pathlib import Path
from typing import Final

from agent_runtime.tools.sandbox import SandboxUnavailable

logger = logging.getLogger(__name__)

_END_TIMEOUT_S: Final = 20.0
_NOT_IN_A_MOUNT: Final = ',"'


@dataclass(frozen=True, slots=True)
class Container:
    """A `Sandbox`: a command sees the image (read-only), an empty /tmp and the working directory (writable).

    No network unless allowed, no capabilities, and the user who owns the working directory instead of root. The image
    must be there already: nothing is pulled while a model waits.
    """

    image: str
    program: str = "podman"
    """`podman` or `docker`, or the path of one."""
    network: bool = False
    memory: str = "2g"
    pids: int = 256
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment of commands beside HOME, LANG and TERM; that of the agent never reaches them."""

    def __post_init__(self) -> None:
        """
        Raises:
            SandboxUnavailable: the program is not installed.
        """
        if shutil.which(self.program) is None:
            raise SandboxUnavailable(
                f"{self.program!r} is not installed; install podman or docker, or use another sandbox"
            )

    def wrap(self, arguments: Sequence[str], directory: Path) -> list[str]:
        """The command line that runs `arguments` in a container of its own.

        Raises:
            ValueError: the path of the directory cannot be written as a mount.
        """
        place = str(directory)
        if any(character in place for character in _NOT_IN_A_MOUNT):
            raise ValueError(f"the working directory {place!r} has a comma or a quote: no mount can name it; move it")
        owner = directory.stat()
        options = ["--rm", "--init", "--pull=never", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL"]
        options += ["--security-opt=no-new-privileges", f"--pids-limit={self.pids}", f"--memory={self.memory}"]
        options += [f"--user={owner.st_uid}:{owner.st_gid}"]
        if Path(self.program).name == "podman" and geteuid() != 0:
            options.append("--userns=keep-id")  # else a rootless container knows the owner by another number
        if not self.network:
            options.append("--network=none")
        options += [f"--mount=type=bind,source={place},destination={place}", f"--workdir={place}"]
        environment = {"HOME": place, "LANG": "C.UTF-8", "TERM": "dumb", **self.environment}
        options += [f"--env={name}={value}" for name, value in environment.items()]
        name = f"agent-{secrets.token_hex(8)}"
        return [self.program, "run", "--name", name, *options, self.image, *arguments]

    def end(self, command: Sequence[str]) -> None:
        """Kill the container of a command line that `wrap` made: it may outlive its client. Blocks; never raises."""
        name = command[command.index("--name") + 1]
        try:
            subprocess.run(
                [self.program, "kill", name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_END_TIMEOUT_S,
                check=False,  # it may have ended by itself
            )
        except (OSError, subprocess.TimeoutExpired):
            logger.exception("the container %s could not be killed; it may be running still", name)
