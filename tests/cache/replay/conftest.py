"""Small synthetic traces in the two file formats, and the real ones where they are present."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

TraceWriter = Callable[[Sequence[dict[str, Any]]], Path]


@pytest.fixture
def write_trace(tmp_path: Path) -> TraceWriter:
    """Function that writes JSON lines to a new file and returns its path."""

    def write(lines: Sequence[dict[str, Any]]) -> Path:
        path = tmp_path / f"trace-{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def shared_traces(repository: Path) -> Path:
    """Folder of the public traces beside the clone; skips when it is not there."""
    directory = repository.parent / "shared" / "traces"
    if not directory.is_dir():
        pytest.skip("traces are not present: expected a folder shared/traces beside the clone")
    return directory
