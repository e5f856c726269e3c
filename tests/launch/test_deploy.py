"""The files for deploying name flags, paths and times that are so."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from k3_sglang.launch.settings import parse
from k3_sglang.launch.supervisor import CLOSE_S


@pytest.fixture
def unit(repository: Path) -> str:
    """The systemd unit."""
    return (repository / "deploy" / "systemd" / "k3.service").read_text(encoding="utf-8")


def of(unit: str, key: str) -> str:
    """The value of a key."""
    (value,) = re.findall(rf"^{key}=(.*)$", unit, re.MULTILINE)
    return value


def test_the_unit_starts_the_launcher_with_flags_it_knows(unit: str, repository: Path) -> None:
    _, dash_m, module, *flags = shlex.split(of(unit, "ExecStart"))
    assert (dash_m, module) == ("-m", "k3_sglang.launch")
    flags[flags.index("--config") + 1] = str(repository / "configs" / "k3-8xb300.yaml")
    settings = parse(flags).settings
    assert settings.log_format == "json"
    assert int(of(unit, "TimeoutStopSec")) > 2 * (settings.stop_grace_s + CLOSE_S)


def test_the_unit_is_one_for_systemd(unit: str, tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze here")
    file = tmp_path / "k3.service"
    file.write_text(unit.replace("/opt/k3/.venv/bin/python", sys.executable), encoding="utf-8")
    done = subprocess.run([program, "verify", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and str(file.name) not in done.stderr, done.stderr


def test_the_container_starts_the_launcher_and_copies_what_there_is(repository: Path) -> None:
    text = (repository / "deploy" / "container" / "Containerfile").read_text(encoding="utf-8")
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0])
    command = json.loads(re.findall(r"^CMD (.*)$", text, re.MULTILINE)[0])
    assert entry[:3] == ["python", "-m", "k3_sglang.launch"]
    ways = [command, *(shlex.split(words) for words in re.findall(r"^# +podman run .* k3( .*)?$", text, re.MULTILINE))]
    assert len(ways) == 3
    for words in ways:
        settings = parse([*entry[3:], *(words or command)]).settings
        # The gateway refuses to listen on all addresses unless keys are named, or their absence is.
        assert settings.allow_no_keys != (settings.api_keys_env is not None)
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        for name in line.split()[:-1]:
            assert (repository / name).exists(), name
