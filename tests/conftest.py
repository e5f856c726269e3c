"""Fixtures for every test folder: repository paths, optional reference data, free ports, a clean environment."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """A terminated run ends as an interrupted one does: fixtures stop their servers."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A shell's background jobs ignore interrupts, and so would every program that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # How long an example takes says something about the machine's other work, not about the code.
    settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("no clock")


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root folder of the clone."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_k3() -> Path:
    """Reference data beside the clone (the release's vocabulary, golden conversations); skips when it is not there."""
    directory = REPOSITORY.parent / "shared" / "k3"
    if not directory.is_dir():
        pytest.skip("reference data is not present: expected a folder shared/k3 beside the clone")
    return directory


@pytest.fixture(scope="session")
def golden(shared_k3: Path) -> Path:
    """Folder of golden conversations and checkpoints inside the reference data; skips when it is not there."""
    directory = shared_k3 / "golden"
    if not directory.is_dir():
        pytest.skip("golden data is not present: expected a folder shared/k3/golden beside the clone")
    return directory


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Function that returns a TCP port of the loopback interface on which nobody listened a moment ago."""

    def pick() -> int:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return pick


@pytest.fixture(autouse=True)
def environment_is_restored() -> Iterator[None]:
    """Fail a test that leaves a changed variable of this project in the environment."""

    def ours() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith(("K3_", "SGLANG_"))}

    before = ours()
    yield
    assert ours() == before, "the test left changed K3_*/SGLANG_* variables; set them with monkeypatch"
