"""The doctor on checkpoints that are really broken, on a blocked import, on a busy port; and on a sound one."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k3_sglang import tiny
from k3_sglang.launch.__main__ import main
from k3_sglang.launch.doctor import checkpoint as checkpoints
from k3_sglang.launch.doctor import command, configuration, machine, software
from k3_sglang.launch.doctor.findings import Finding
from k3_sglang.launch.planner.hardware import GIB
from k3_sglang.launch.settings import validate
from k3_sglang.loading.headers import INDEX_FILE

SHARD = "model-00002-of-000003.safetensors"


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """A copy of the tiny model's checkpoint, which is whole."""
    return Path(shutil.copytree(tiny.ensure(), tmp_path / "copy"))


def blocking(directory: Path, *, hashes: bool = True) -> list[Finding]:
    return [one for one in checkpoints.look(directory, hashes=hashes) if one.level == "blocks"]


def test_a_sound_checkpoint_is_found_sound(sound: Path) -> None:
    found = checkpoints.look(sound)
    assert [one.area for one in found if one.level == "ok"] == ["tokenizer", "index", "weights"]
    assert blocking(sound) == []


def remove(directory: Path) -> None:
    (directory / SHARD).unlink()


def truncate(directory: Path) -> None:
    with (directory / SHARD).open("r+b") as file:
        file.truncate((directory / SHARD).stat().st_size - 1000)


def misname(directory: Path) -> None:
    path = directory / INDEX_FILE
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"]["language_model.model.layers.7.nowhere.weight"] = SHARD
    path.write_text(json.dumps(index), encoding="utf-8")


def spoil_index(directory: Path) -> None:
    (directory / INDEX_FILE).write_text("{", encoding="utf-8")


def cut_vocabulary(directory: Path) -> None:
    path = directory / "tiktoken.model"
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:-5]), encoding="utf-8")


def move_end(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["eos_token_id"] += 1
    path.write_text(json.dumps(config), encoding="utf-8")


def widen(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["text_config"]["intermediate_size"] += 32
    path.write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "area", "expected", "fix"),
    [
        (remove, "weights", f"lacks {SHARD}", "download"),
        (truncate, "weights", "and its header describes", "download it again"),
        (misname, "index", "names language_model.model.layers.7.nowhere.weight in", "download it again"),
        (spoil_index, "index", "cannot be read", "download it again"),
        (cut_vocabulary, "tokenizer", "it is cut off", "download it again"),
        (move_end, "tokenizer", "but config.json ends at", "take tiktoken.model"),
        (widen, "weights", "tensor(s) have a wrong shape", "same download"),
    ],
)
def test_what_is_broken_is_named_with_a_remedy(
    sound: Path, spoil: Callable[[Path], None], area: str, expected: str, fix: str
) -> None:
    spoil(sound)
    found = [one for one in blocking(sound) if one.area == area]
    assert found, blocking(sound)
    assert any(expected in one.text for one in found), found
    assert any(fix in f"{one.text} {one.fix}" for one in found)


def test_hashes_are_compared_where_a_list_of_them_is_there(sound: Path) -> None:
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(sound.iterdir())]
    (sound / "SHA256SUMS").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert blocking(sound) == []
    assert any(one.area == "hashes" and one.level == "ok" for one in checkpoints.look(sound))
    with (sound / SHARD).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    (wrong,) = blocking(sound)
    assert wrong.text == f"{SHARD} has other bytes than SHA256SUMS says"
    assert blocking(sound, hashes=False) == []
    (sound / "SHA256SUMS").write_text("no hash\n", encoding="utf-8")
    assert "line 1 is not a hash and a file name" in blocking(sound)[0].text


@pytest.mark.parametrize("listed", ["", f"{'0' * 64}  README.md\n"])
def test_a_list_of_hashes_that_leaves_weights_out_is_no_proof_of_them(sound: Path, listed: str) -> None:
    (sound / "README.md").touch()
    listed = listed.replace("0" * 64, hashlib.sha256(b"").hexdigest())
    (sound / "SHA256SUMS").write_text(listed, encoding="utf-8")
    (told,) = (one for one in checkpoints.look(sound) if one.area == "hashes")
    assert told.level == "note" and SHARD in told.text


@pytest.mark.parametrize(
    ("values", "expected", "fix"),
    [
        ({"host": "0.0.0.0"}, "the gateway refuses: host is '0.0.0.0'", "set api_keys_file or api_keys_env"),
        ({"gateway": {"max_runing": 3}}, "max_runing", ""),
        ({"gateway": {"upstream": "openai"}}, "gateway.upstream", ""),
        ({"context_len": 1 << 30}, "this model's maximum is", ""),
        ({"ep": 3, "tp": 3}, "ep is 3", ""),
        ({"nodes": 2, "tp": 2}, "dist_init_addr is not set", "give HOST:PORT of the first machine"),
        ({"ledger": "/dev/null/ledger.db"}, "ledger names '/dev/null/ledger.db'", "name another"),
        ({"engine": {"api-key": "x"}}, "engine.api-key is refused", ""),
        ({"engine": {"kv-cache-dtype": "fp8_e4m3"}}, "on device cpu: the CPU has no FP8 latents", "leave it out (FP8"),
    ],
)
def test_what_a_launch_refuses_the_doctor_tells_too(values: dict[str, object], expected: str, fix: str) -> None:
    settings = validate({"device": "cpu", "port": 0, **values}, source="test")
    found = configuration.look(settings, has_model=True)
    assert [one.level for one in found] == ["blocks"]
    assert expected in f"{found[0].text}; {found[0].fix}" and found[0].fix.startswith(fix)


def test_settings_that_a_launch_takes_are_told_as_such() -> None:
    found = configuration.look(validate({"device": "cpu", "port": 0}, source="test"), has_model=True)
    assert [one.level for one in found] == ["ok"]


def test_no_checkpoint_at_all_is_one_finding(tmp_path: Path) -> None:
    (only,) = checkpoints.look(tmp_path)
    assert only.level == "blocks" and "config.json does not exist" in only.text


def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import is really blocked in the process that tries it."""
    (tmp_path / "xgrammar.py").write_text("raise ImportError('blocked for this test')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = software.imports(("xgrammar", "json"), "cpu")
    assert found.level == "blocks"
    assert found.text == "xgrammar cannot be imported: ImportError: blocked for this test"
    assert "install the extra `serve`" in found.fix
    (fine,) = software.imports(("json", "tiktoken"), "cpu")
    assert fine.level == "ok"


def test_kernels_and_transports_that_are_not_installed_are_named() -> None:
    def version(name: str) -> str:
        if name == "flashinfer-python":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    found = software.kernels(version)
    assert [one.level for one in found].count("blocks") == 1
    assert any("flashinfer-python is not installed" in one.text for one in found)
    assert software.transport_package("nixl", version)[0].level == "ok"
    assert software.transport_package("fake", version) == []


def test_another_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 1))
    found = software.python()
    assert found.level == "blocks" and "Python 3.11" in found.fix


def test_memory_disk_and_limits(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 20000000 kB\nMemAvailable:   10485760 kB\n", encoding="utf-8")
    assert machine.memory("cpu", 6 * GIB, file).level == "ok"
    assert machine.memory("cpu", 7 * GIB, file).level == "blocks"
    assert machine.memory("cuda", 700 * GIB, file).level == "ok"
    assert machine.memory("cpu", 1, tmp_path / "none").level == "note"
    assert machine.disk(tmp_path, 1 * GIB).level == "note"
    assert machine.shared_memory(size_bytes=GIB).level == "note"
    assert machine.shared_memory(size_bytes=64 * GIB).level == "ok"


def test_the_command_ends_with_one_when_a_port_is_busy_and_tells_programs_in_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "MODULES", ("json",))
    monkeypatch.setattr(software.look, "__kwdefaults__", {"modules": ("json",)})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["doctor", "--device", "cpu", "--port", str(port), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    (busy,) = (one for one in told["findings"] if one["level"] == "blocks")
    assert told["blocked"] and busy["area"] == "ports"
    assert busy["text"].startswith(f"port {port} on 127.0.0.1 cannot be used")
    assert main(["doctor", "--device", "cpu", "--port", "0"]) == 0
    shown = capsys.readouterr().out
    assert "nothing blocks the launch" in shown and "tokenizer" in shown
    assert main(["doctor", "--model", "/no/such/folder", "--device", "cpu", "--port", "0"]) == 1
    assert "BLOCKS" in capsys.readouterr().out


def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--nothing"]) == 2
    assert "doctor: unrecognized arguments: --nothing" in capsys.readouterr().err
    assert command.AREA_WIDTH > 0
