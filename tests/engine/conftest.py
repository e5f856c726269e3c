"""Fixtures of the engine tests: a server with the tiny model and one with the golden checkpoint, for the session."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.k3_cache import CHECK_ENV, MODES, Mode
from tests.engine.stack import Engine, Stack, configuration, running


def two_free_ports() -> tuple[int, int]:
    """Two different ports of the loopback interface on which nobody listened a moment ago."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])


@pytest.fixture(scope="session")
def ledger_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's gateway keeps its ledger."""
    return tmp_path_factory.mktemp("ledger") / "ledger.db"


@pytest.fixture(scope="session")
def stack(repository: Path, ledger_file: Path) -> Iterator[Stack]:
    """Engine and gateway with the tiny model, as `make serve` starts them, and a ledger."""
    engine_port, gateway_port = two_free_ports()
    arguments = [*configuration(repository), "--ledger", str(ledger_file)]
    with running(arguments, engine_port, gateway_port) as started:
        yield started


@pytest.fixture
def engine(stack: Stack) -> Iterator[Engine]:
    """The session's engine with an empty prefix cache."""
    client = Engine(stack.engine_url)
    with client.http:
        client.flush()
        yield client


@pytest.fixture(scope="session", params=list(MODES.values()), ids=list(MODES))
def mode(request: pytest.FixtureRequest) -> Mode:
    """How the engine with the checkpoint cache runs; one server lives at a time."""
    return request.param


@pytest.fixture(scope="session")
def k3_stack(mode: Mode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Engine and gateway with the checkpoint cache and small pools."""
    file = tmp_path_factory.mktemp("k3") / "k3.yaml"
    file.write_text(mode.configuration, encoding="utf-8")
    with running(["--config", str(file)], *two_free_ports(), {CHECK_ENV: "1"}) as started:
        yield started


@pytest.fixture
def k3(k3_stack: Stack) -> Iterator[Engine]:
    """That engine, empty; whatever a test did, nothing is lost or counted twice."""
    with Engine.empty(k3_stack.engine_url) as client:
        yield client


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The reference model runs here, beside the engine, on tensors too small for more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


GOLDEN_SIZES = ["--kv-tokens", "8192", "--state-slots", "48", "--max-running-requests", "4", "--page-size", "1"]


def golden_arguments(golden: Path, dtype: str) -> list[str]:
    """Launcher arguments of a server on the golden checkpoint; a prompt is computed in one piece."""
    arguments = ["--model", str(golden / "checkpoint"), "--device", "cpu", "--dtype", dtype, "--constrain", "off"]
    arguments += ["--experts", "packed"]  # the tiny model of the other tests unpacks its own
    return [*arguments, *GOLDEN_SIZES, "--log-level", "warning"]


@pytest.fixture(scope="session")
def golden_dump_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that the golden engine writes its forward passes to while a test has created it."""
    return tmp_path_factory.mktemp("golden") / "passes"


@pytest.fixture(scope="session")
def golden_engine(golden: Path, golden_dump_dir: Path) -> Iterator[Engine]:
    """An engine in fp32 on the golden checkpoint, experts kept as MXFP4, prompts computed in one piece."""
    environment = {"K3_SGLANG_DUMP_DIR": str(golden_dump_dir)}
    with running(golden_arguments(golden, "float32"), *two_free_ports(), environment) as started:
        client = Engine(started.engine_url)
        with client.http:
            yield client


CHUNK_TOKENS = 100
"""No multiple of the grid of SGLang's cache."""


@pytest.fixture(scope="session")
def chunked_dump_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ``golden_dump_dir``, for the engine below."""
    return tmp_path_factory.mktemp("chunked") / "passes"


@pytest.fixture(scope="session")
def chunked_engine(golden: Path, chunked_dump_dir: Path) -> Iterator[Engine]:
    """The golden checkpoint with SGLang's cache, which keeps states inside prefills, and prompts cut into chunks."""
    arguments = [*golden_arguments(golden, "float32"), "--chunked-prefill-tokens", str(CHUNK_TOKENS)]
    arguments += ["--cache", "sglang"]
    with running(arguments, *two_free_ports(), {"K3_SGLANG_DUMP_DIR": str(chunked_dump_dir)}) as started:
        client = Engine(started.engine_url)
        with client.http:
            yield client


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that needs a server also waits for it to start."""
    for item in items:
        if "tests/engine" in str(item.path) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))
