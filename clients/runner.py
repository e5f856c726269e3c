"""Run one driver in its client's environment: a scratch home, a time limit, nothing left running."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from clients.catalog import Client

DRIVERS = Path(__file__).resolve().parent / "drivers"
LAST_CHARS = 4000
KEPT = ("LANG", "LC_ALL", "TERM", "TZ", "SSL_CERT_FILE")
"""Variables of the caller that a driver gets; none of them can name another server or account."""


@dataclass(frozen=True)
class Outcome:
    """How a driver ended."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Its last line of output."""
    problem: str = ""
    """Why there are no facts, in one line."""
    output: str = ""
    """The end of what it printed, for whoever looks into a problem."""


@dataclass(frozen=True)
class Target:
    """A server as a driver is told of it."""

    url: str
    """Without /v1."""
    model: str
    max_tokens: int
    """Limit of an answer, for clients whose limit can be set."""


def run(client: Client, environment: Path, target: Target, proxy: str, timeout_s: int) -> Outcome:
    """Run the client's driver against a server, with ``proxy`` between it and every host but this one."""
    with tempfile.TemporaryDirectory(prefix="k3-client-", ignore_cleanup_errors=True) as scratch:
        home, work = Path(scratch) / "home", Path(scratch) / "work"
        home.mkdir()
        work.mkdir()
        (work / "notes.txt").write_text("Oslo: rain, 9 degrees\nBergen: rain, 11 degrees\n", encoding="utf-8")
        variables = _variables(environment, home, proxy)
        variables |= {"CLIENT_URL": target.url, "CLIENT_MODEL": target.model}
        variables["CLIENT_MAX_TOKENS"] = str(target.max_tokens)
        process = subprocess.Popen(
            [*_interpreter(client, environment), str(_driver(client, environment, work)), *client.arguments],
            cwd=work,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            output, _ = process.communicate()
            return Outcome(problem=f"not finished after {timeout_s} s", output=output[-LAST_CHARS:])
        finally:
            _kill(process)  # whatever it left behind
    return _outcome(process.returncode, output)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _interpreter(client: Client, environment: Path) -> list[str]:
    if client.environment.kind == "python":
        return [str(environment / "bin" / "python")]
    if client.driver.endswith(".py"):
        return [sys.executable]
    return [str(environment / "node_modules" / ".bin" / "node")]


def _driver(client: Client, environment: Path, work: Path) -> Path:
    """The driver's file; one for Node lies beside the packages it imports, for that is where Node looks."""
    driver = DRIVERS / client.driver
    if driver.suffix != ".mjs":
        return driver
    (work / "node_modules").symlink_to(environment / "node_modules")
    return Path(shutil.copy(driver, work))


def _variables(environment: Path, home: Path, proxy: str) -> dict[str, str]:
    """A clean environment: scratch folders, the fence as proxy for every host but this one."""
    programs = [environment / "bin", environment / "node_modules" / ".bin"]
    return {
        **{name: os.environ[name] for name in KEPT if name in os.environ},
        "PATH": os.pathsep.join([*map(str, programs), os.defpath]),
        "CLIENT_ENVIRONMENT": str(environment),
        "HOME": str(home),
        "TMPDIR": str(home),
        "HTTP_PROXY": proxy,
        "HTTPS_PROXY": proxy,
        "http_proxy": proxy,
        "https_proxy": proxy,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _outcome(code: int, output: str) -> Outcome:
    lines = [line for line in output.splitlines() if line.strip()]
    try:
        facts = json.loads(lines[-1]) if lines else None
    except ValueError:
        facts = None
    end = output[-LAST_CHARS:]
    if code == 0 and isinstance(facts, dict):
        return Outcome(facts, output=end)
    return Outcome(problem=f"exit code {code}: {lines[-1][:300] if lines else 'no output'}", output=end)


def version(client: Client, environment: Path) -> str:
    """The installed version of a client's package; ``?`` when the environment does not tell."""
    if client.environment.kind == "node":
        manifest = environment / "node_modules" / client.package / "package.json"
        return str(json.loads(manifest.read_text(encoding="utf-8"))["version"]) if manifest.is_file() else "?"
    packages = [str(path) for path in (environment / "lib").glob("python*/site-packages")]
    found = (one.version for one in distributions(name=client.package, path=packages))
    return next(found, "?")
