"""Announcements: one file per kind and process, whole or absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3_sglang.announce import DIRECTORY_VARIABLE, announce, read_announcements


def test_an_announcement_is_read_back_with_kind_pid_and_details(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    announce("pools", kv_tokens=10, state_slots=3)
    (announcement,) = read_announcements(tmp_path)
    assert (announcement.kind, announcement.pid) == ("pools", os.getpid())
    assert announcement.details == {"kv_tokens": 10, "state_slots": 3}


def test_a_second_announcement_of_a_kind_replaces_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    announce("model", layers=1)
    announce("model", layers=2)
    assert [announcement.details for announcement in read_announcements(tmp_path)] == [{"layers": 2}]


def test_processes_announce_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    announce("plugin")
    code = "from k3_sglang.announce import announce; announce('plugin')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    found = read_announcements(tmp_path)
    assert [announcement.kind for announcement in found] == ["plugin", "plugin"]
    assert len({announcement.pid for announcement in found}) == 2


def test_nothing_is_written_when_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    announce("plugin")
    assert list(tmp_path.iterdir()) == []


def test_a_kind_that_is_no_file_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'\.\./x'.*letters"):
        announce("../x")


def test_a_detail_that_is_not_json_is_refused_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    with pytest.raises(TypeError, match="not JSON serializable"):
        announce("model", dtype=object())
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.1.json").write_text('{"kind": "model"', encoding="utf-8")
    with pytest.raises(ValueError, match=r"model\.1\.json"):
        read_announcements(tmp_path)
