"""Fixtures of the engine tests: a server with the tiny model and one with the golden checkpoint, for the session."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.stack import Engine, Stack, configuration, running


def two_free_ports() -> tuple[int, int]:
    """Two different ports of the loopback interface on which nobody listened a moment ago."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])


@pytest.fixture(scope="session")
def stack(repository: Path) -> Iterator[Stack]:
    """Engine and gateway with the tiny model, as `make serve` starts them."""
    engine_port, gateway_port = two_free_ports()
    with running(configuration(repository), engine_port, gateway_port) as started:
        yield started


@pytest.fixture
def engine(stack: Stack) -> Iterator[Engine]:
    """The session's engine with an empty prefix cache."""
    client = Engine(stack.engine_url)
    with client.http:
        client.flush()
        yield client


@pytest.fixture(scope="session")
def golden_server(golden: Path) -> Iterator[Stack]:
    """An engine in fp32 on the golden checkpoint; experts stay MXFP4, a prefill is cut every 64 tokens."""
    arguments = ["--model", str(golden / "checkpoint"), "--device", "cpu", "--dtype", "float32", "--constrain", "off"]
    arguments += ["--experts", "packed"]  # the tiny model of the other tests unpacks its own
    arguments += ["--kv-tokens", "8192", "--state-slots", "48", "--max-running-requests", "4", "--page-size", "1"]
    arguments += ["--chunked-prefill-tokens", "64", "--log-level", "warning"]
    with running(arguments, *two_free_ports()) as started:
        yield started


@pytest.fixture
def golden_engine(golden_server: Stack) -> Iterator[Engine]:
    """The golden checkpoint's engine with an empty prefix cache."""
    client = Engine(golden_server.engine_url)
    with client.http:
        client.flush()
        yield client


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that needs a server also waits for it to start."""
    for item in items:
        if "tests/engine" in str(item.path) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))
