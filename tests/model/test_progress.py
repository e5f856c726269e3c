"""Progress of loading: every tensor passes through once, and the launcher hears of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from k3_sglang.announce import DIRECTORY_VARIABLE, LOADING, read_announcements
from k3_sglang.loading import progress
from k3_sglang.loading.progress import described, followed


def test_tensors_pass_through_unchanged_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    tensors = [(f"t{i}", torch.zeros(i)) for i in range(4)]
    heard: list[int] = []
    with caplog.at_level(logging.INFO):
        for (name, tensor), (wanted_name, wanted) in zip(followed(tensors, 8), tensors, strict=True):
            assert (name, tensor) == (wanted_name, wanted)
            heard += [a.details["done"] for a in read_announcements(tmp_path) if a.kind == LOADING]
    assert heard == [1, 2, 3]  # a tensor counts once the next one is asked for: then it has been written
    (final,) = read_announcements(tmp_path)
    assert (final.details["done"], final.details["total"]) == (4, 8)
    assert "loading weights 12 % (1/8 tensors, 0.0 GB)" in caplog.text
    assert "read weights 50 % (4/8 tensors, 0.0 GB) in" in caplog.text


def test_a_fast_load_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert len(list(followed([("a", torch.zeros(1))] * 50, 50))) == 50
    assert len(caplog.records) == 1


def test_large_counts_are_readable() -> None:
    assert described(412, 1103, 1_200_000_000) == "37 % (412/1,103 tensors, 1.2 GB)"
    assert described(0, 0, 0) == "0 % (0/0 tensors, 0.0 GB)"
