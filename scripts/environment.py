"""Make the development environment: one shared by all clones with the dependencies, and a thin `.venv` with this clone.

The dependencies (11 GB with the engine) go into `<home>/<key>`, where the key is a hash of the dependency tables of
pyproject.toml and of the exact Python. `.venv` in the clone sees them through a .pth file and holds only the editable
install of this clone, so entry points resolve to the clone that runs and two clones never disturb each other.
Standard library only: it runs before anything is installed, on any Python 3 that is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

PYTHON = (3, 11)
PROGRESS_EVERY_S = 10
LAST_LINES = 20
LINE_CHARS = 100
COMPLETE = ".k3-complete"
"""Marker file written last: an environment without it was interrupted and is built again."""
LAYER = ".k3-layer"
"""Marker file in the clone's `.venv`; its text says what the layer was made from."""


class EnvironmentProblem(Exception):
    """Something only the user can fix; the message is one line with the remedy."""


def say(text: str) -> None:
    """Progress goes to stderr, so that stdout stays the caller's."""
    print(f"environment: {text}", file=sys.stderr, flush=True)


def read_project(repository: Path) -> dict[str, Any]:
    """The parsed pyproject.toml."""
    import tomllib  # only after the version check: older Pythons lack it

    with (repository / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def requirements(project: dict[str, Any]) -> list[str]:
    """Everything the tests and the engine need, the build backend included, without the project itself."""
    extras = project["project"]["optional-dependencies"]
    return [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(requirement for name in sorted(extras) for requirement in extras[name]),
    ]


def environment_key(wanted: list[str]) -> str:
    """Name of the shared environment: same requirements, same Python build and platform, same name."""
    text = json.dumps([wanted, sys.version, sys.prefix, sysconfig.get_platform()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def environments_home() -> Path:
    """Folder of the shared environments: $K3_VENV_DIR, else the user's cache folder."""
    if chosen := os.environ.get("K3_VENV_DIR"):
        return Path(chosen).expanduser().resolve()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().resolve() / "k3-sglang" / "venvs"


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold an advisory lock; the kernel releases it when this process and the commands it runs have ended.

    Commands inherit the lock: an installer that outlives this process keeps the folder it writes to.
    """
    with path.open("w") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is building this environment; waiting for {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(*command: str | Path) -> None:
    """Run a command and show, now and then, the last line it printed; when it fails, show its last lines.

    Raises:
        EnvironmentProblem: it failed.
    """
    words = [str(word) for word in command]
    last: deque[str] = deque(maxlen=LAST_LINES)
    started = told = time.monotonic()
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        close_fds=False,  # inherit the lock
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line.rstrip())
            if line.startswith("Installing collected packages"):
                say("downloads are complete; unpacking takes about two minutes more")
            elif time.monotonic() - told > PROGRESS_EVERY_S:
                told = time.monotonic()
                say(f"{told - started:4.0f} s  {line.strip()[:LINE_CHARS]}")
    if process.returncode != 0:
        print("\n".join(last), file=sys.stderr)
        raise EnvironmentProblem(f"`{' '.join(words)}` failed with exit code {process.returncode}; see above")


def build_shared(directory: Path, wanted: list[str]) -> None:
    """Create the shared environment at its final path (scripts in it name that path) and mark it complete."""
    if (directory / COMPLETE).is_file():
        return
    started = time.monotonic()
    shutil.rmtree(directory, ignore_errors=True)
    say(f"installing {len(wanted)} requirements into {directory} (about 11 GB; 5 to 15 minutes the first time)")
    run(sys.executable, "-m", "venv", directory)
    python = directory / "bin" / "python"
    run(python, "-m", "pip", "install", "--upgrade", "pip")
    listing = directory / "requirements.txt"
    listing.write_text("\n".join(wanted) + "\n", encoding="utf-8")
    run(python, "-m", "pip", "install", "--progress-bar", "off", "-r", listing)
    run(python, "-m", "pip", "check")
    (directory / COMPLETE).write_text("\n".join(wanted) + "\n", encoding="utf-8")
    say(f"dependencies installed in {time.monotonic() - started:.0f} s")


def is_current(layer: Path, made_from: str) -> bool:
    """Whether `.venv` was made from exactly this, for this clone."""
    marker = layer / LAYER
    return marker.is_file() and marker.read_text(encoding="utf-8") == made_from


def build_layer(repository: Path, shared: Path) -> None:
    """Create the clone's `.venv` over the shared environment and install the clone into it, editable."""
    layer = repository / ".venv"
    pyproject = (repository / "pyproject.toml").read_bytes()
    made_from = f"{layer}\n{shared}\n{hashlib.sha256(pyproject).hexdigest()}\n"
    if is_current(layer, made_from):
        return
    if layer.exists() and not (layer / LAYER).is_file():
        raise EnvironmentProblem(f"{layer} exists and was not made by this script; move it away and run again")
    shutil.rmtree(layer, ignore_errors=True)
    layer.mkdir()
    (layer / LAYER).write_text("unfinished\n", encoding="utf-8")
    run(shared / "bin" / "python", "-m", "venv", "--without-pip", layer)
    packages = f"lib/python{PYTHON[0]}.{PYTHON[1]}/site-packages"
    # addsitedir, not a bare path: .pth files of the dependencies must be honoured too.
    path_file = f"import site; site.addsitedir({str(shared / packages)!r})\n"
    (layer / packages / "_k3_dependencies.pth").write_text(path_file, encoding="utf-8")
    link_programs(shared / "bin", layer / "bin")
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--editable")
    run(layer / "bin" / "python", *install, repository)
    (layer / LAYER).write_text(made_from, encoding="utf-8")
    say(f"{layer} is ready")


def link_programs(source: Path, target: Path) -> None:
    """Link compiled programs (ninja, ruff) into the layer; Python scripts name the shared interpreter and stay out."""
    for program in source.iterdir():
        if program.name.startswith("python") or (target / program.name).exists():
            continue
        with program.open("rb") as file:
            if file.read(4) == b"\x7fELF":
                (target / program.name).symlink_to(program)


def main() -> int:
    """Make both parts; afterwards `.venv/bin/python` runs everything."""
    if sys.version_info[:2] != PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        say(
            f"found Python {found} at {sys.executable}; SGLang is published for Python {PYTHON[0]}.{PYTHON[1]} only: "
            f"install it, or name it with `make PY=/path/to/python{PYTHON[0]}.{PYTHON[1]}`"
        )
        return 2
    repository = Path(__file__).resolve().parent.parent
    wanted = requirements(read_project(repository))
    home = environments_home()
    shared = home / environment_key(wanted)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with locked(home / f"{shared.name}.lock"):
            build_shared(shared, wanted)
        with locked(repository / ".venv.lock"):
            build_layer(repository, shared)
    except EnvironmentProblem as problem:
        say(str(problem))
        return 1
    except OSError as problem:  # a folder that may not be written, a full disk
        say(f"{problem}; dependencies go to {home} (K3_VENV_DIR names another folder), the rest to {repository}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run starts this environment again")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
