"""Fixtures of the numerical tests: one torch thread, one tiny checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from k3_sglang import tiny


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tensors here are small: more threads cost more than they bring, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny K3, seed 0; tests that change files copy it first."""
    return tiny.build(tmp_path_factory.mktemp("checkpoint") / "tiny")
