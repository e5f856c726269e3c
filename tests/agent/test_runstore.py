"""The file of a run log: one writer, whole lines, and what is damaged is named."""

import json
import os
from pathlib import Path

import pytest

from agent_runtime.runstore import FileRunStore, RunLogError, read_run_log


def test_entries_come_back_in_order_with_every_character(tmp_path: Path) -> None:
    wanted = [{"kind": "a", "text": "x\ny\u2028🙂\ud800"}, {"kind": "b", "n": [1, None]}]
    with FileRunStore(tmp_path / "log", sync=True) as store:
        for entry in wanted:
            store.append(entry)
        assert list(store.entries()) == wanted
    assert read_run_log(tmp_path / "log") == wanted
    assert os.stat(tmp_path / "log").st_mode & 0o777 == 0o600, "what a user said is nobody else's to read"


def test_a_piece_of_a_last_line_is_cut_off_before_anything_is_added(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"kind":"a"}\n{"kind":"b","te')
    assert read_run_log(path) == [{"kind": "a"}] and path.read_bytes().endswith(b"te"), "reading changes nothing"
    with FileRunStore(path) as store:
        store.append({"kind": "c"})
    assert read_run_log(path) == [{"kind": "a"}, {"kind": "c"}]


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    with FileRunStore(tmp_path / "log") as store:
        store.append({"kind": "a"})
        with pytest.raises(RunLogError, match="is being written by another process"):
            FileRunStore(tmp_path / "log")
        assert read_run_log(tmp_path / "log") == [{"kind": "a"}]
    FileRunStore(tmp_path / "log").close()


@pytest.mark.parametrize(
    ("line", "words"),
    [(b"{broken}\n", "line 2 is damaged"), (b"[]\n", "line 2 is no entry"), (b'{"x": 1}\n', "line 2 is no entry")],
)
def test_a_whole_line_that_is_no_entry_is_an_error_with_its_number(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"kind":"a"}\n' + line)
    with pytest.raises(RunLogError, match=words):
        read_run_log(path)
    with pytest.raises(RunLogError, match=words):
        FileRunStore(path)
    assert path.read_bytes().endswith(line), "nothing was repaired away"


def test_an_entry_that_cannot_be_written_whole_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileRunStore(tmp_path / "log") as store:
        store.append({"kind": "a"})
        real = os.write

        def full(file: int, data: bytes) -> int:
            if len(data) < 20:
                raise OSError(28, "No space left on device")
            return real(file, data[:-10])

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            store.append({"kind": "b", "text": "long enough"})
        monkeypatch.undo()
        store.append({"kind": "c"})
        assert [json.loads(line)["kind"] for line in (tmp_path / "log").read_text().splitlines()] == ["a", "c"]
