"""Stage 3: what is known to fail is found before anything starts, each in one line with a remedy."""

from __future__ import annotations

import importlib.metadata
import json
import re
import socket
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from k3_sglang.launch import dry_run, preflight
from k3_sglang.launch.__main__ import main
from k3_sglang.launch.command import gateway_settings
from k3_sglang.launch.flags import Answer
from k3_sglang.launch.resolve import Resolved, resolve
from k3_sglang.launch.settings import validate
from k3_sglang.loading.headers import INDEX_FILE


@pytest.fixture(autouse=True)
def sglang_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking takes a process with all of SGLang; test_presets.py does it, once."""

    def judge(resolved: Resolved) -> Answer:
        return Answer(None, {})

    monkeypatch.setattr(dry_run, "judge", judge)


def installed(**targets: str) -> list[str]:
    """Problems found when these are the only entry points (name=target) of both groups."""

    def find(*, group: str, name: str) -> Iterable[EntryPoint]:
        return [EntryPoint(name, targets[name], group)] if name in targets else []

    return preflight.check_entry_points(find)


def test_this_installation_passes() -> None:
    assert preflight.check_entry_points(importlib.metadata.entry_points) == []


def test_entry_points_that_are_not_installed_are_named_with_the_remedy() -> None:
    first, second = installed()
    assert "'k3_sglang' of group 'sglang.srt.plugins' is not installed; install this package again" in first
    assert "'k3_sglang_cpu' of group 'sglang.srt.platforms'" in second


def test_an_entry_point_to_a_missing_module_is_found() -> None:
    (problem,) = installed(k3_sglang="k3_sglang.plugin:register", k3_sglang_cpu="k3_sglang.nowhere:resolve")
    assert "'k3_sglang.nowhere:resolve' names a module that does not exist" in problem


def test_an_entry_point_to_a_missing_function_is_found() -> None:
    (problem,) = installed(k3_sglang="k3_sglang.plugin:registr", k3_sglang_cpu="k3_sglang.platform_cpu:resolve")
    assert "defines no function 'registr'" in problem


def test_an_entry_point_into_another_package_is_found() -> None:
    (problem,) = installed(k3_sglang="json.decoder:register", k3_sglang_cpu="k3_sglang.platform_cpu:resolve")
    assert "outside the running package" in problem


def test_an_image_folder_that_is_none_is_found_before_the_model_loads(tmp_path: Path) -> None:
    (problem,) = preflight.check_image_folders([str(tmp_path), "pictures"])
    assert "allow_image_files names 'pictures', which is no absolute path of a folder" in problem


def test_a_ledger_that_cannot_be_written_is_found_before_the_model_loads(tmp_path: Path) -> None:
    assert preflight.check_ledger(None) == []
    assert preflight.check_ledger(str(tmp_path / "new" / "ledger.db")) == []
    (tmp_path / "file").touch()
    assert preflight.check_ledger(str(tmp_path / "file")) == []
    for path in (tmp_path, tmp_path / "file" / "ledger.db"):
        (problem,) = preflight.check_ledger(str(path))
        assert "which is no file that can be written" in problem


def test_a_missing_or_different_sglang_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def version_of(name: str) -> str:
        assert name == "sglang"
        return "0.5.22"

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    (problem,) = preflight.check_sglang()
    assert problem.startswith("sglang is 0.5.22; this plugin works with ")

    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    (problem,) = preflight.check_sglang()
    assert problem.startswith("sglang is not installed; install the extra `serve`")


@pytest.mark.parametrize(
    ("environment", "device", "expected"),
    [
        ({}, "cpu", None),
        ({"SGLANG_PLUGINS": "k3_sglang, k3_sglang_cpu"}, "cpu", None),
        ({"SGLANG_PLUGINS": "k3_sglang"}, "cpu", r"leaves out \['k3_sglang_cpu'\]"),
        ({"SGLANG_PLATFORM": "k3_sglang_cpu"}, "cpu", None),
        ({"SGLANG_PLATFORM": "k3_sglang_cpu"}, "cuda", "unset it"),
        ({"SGLANG_PLATFORM": "other"}, "cpu", "unset it"),
        ({"SGLANG_USE_CPU_ENGINE": "1"}, "cpu", "sgl-kernel"),
        ({"SGLANG_USE_CPU_ENGINE": "1"}, "cuda", None),
    ],
)
def test_variables_that_switch_the_plugin_off_are_found(
    environment: dict[str, str], device: str, expected: str | None
) -> None:
    found = preflight.check_environment(environment, device)
    if expected is None:
        assert found == []
    else:
        (problem,) = found
        assert re.search(expected, problem)


def test_a_checkpoint_with_every_file_passes(checkpoint: Path) -> None:
    assert preflight.check_checkpoint(checkpoint, weights=True, images=False) == []


def test_a_shard_that_the_index_names_and_nobody_downloaded_is_found(checkpoint: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}}
    (checkpoint / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    (problem,) = preflight.check_checkpoint(checkpoint, weights=True, images=False)
    assert problem == f"{checkpoint} lacks model-2.safetensors; the download is not complete"
    assert preflight.check_checkpoint(checkpoint, weights=False, images=False) == []


def test_a_checkpoint_without_weights_or_vocabulary_or_with_a_broken_index_is_found(checkpoint: Path) -> None:
    (checkpoint / INDEX_FILE).write_text("[]", encoding="utf-8")
    (problem,) = preflight.check_checkpoint(checkpoint, weights=True, images=False)
    assert "cannot be read" in problem
    (checkpoint / INDEX_FILE).unlink()
    (checkpoint / "model.safetensors").unlink()
    (problem,) = preflight.check_checkpoint(checkpoint, weights=True, images=False)
    assert "holds no *.safetensors files" in problem
    (checkpoint / "tiktoken.model").unlink()
    (problem,) = preflight.check_checkpoint(checkpoint, weights=False, images=False)
    assert "lacks tiktoken.model" in problem


def test_tensors_that_do_not_fit_the_config_end_the_launch_before_it_starts(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["intermediate_size"] += 32
    (checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")
    arguments = ["--model", str(checkpoint), "--device", "cpu", "--port", "0"]
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    gate = "language_model.model.layers.0.mlp.gate_proj.weight"
    assert f"3 tensor(s) have a wrong shape: {gate} has (96, 64) in model.safetensors" in output.err
    assert main([*arguments, "--dry-run"]) == 0


@pytest.mark.parametrize(("load_format", "problems"), [("auto", 1), ("safetensors", 1), ("dummy", 0)])
def test_weights_are_looked_at_only_when_the_engine_reads_them(
    checkpoint: Path, load_format: str, problems: int
) -> None:
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    values = {"model": str(checkpoint), "device": "cpu", "port": 0, "engine": {"load-format": load_format}}
    found = preflight.problems(resolve(validate(values, source="test")))
    assert len(found) == problems
    assert all("model.safetensors is cut off or no safetensors file (100 bytes)" in problem for problem in found)


def test_a_busy_port_ends_the_launch_with_one_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = main(["--model", str(checkpoint), "--device", "cpu", "--port", str(port)])
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert output.err == (
        f"launch: error: port {port} on 127.0.0.1 cannot be used (Address already in use); "
        "choose another, or 0 for a free one\n"
    )


def test_an_address_that_others_reach_needs_keys_before_the_model_loads(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--model", str(checkpoint), "--device", "cpu", "--port", "0", "--host", "0.0.0.0"]
    assert main(line) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith("launch: error: the gateway refuses: host is '0.0.0.0', where others can reach")
    assert "set api_keys_file or api_keys_env" in output.err and "settings file" not in output.err

    keys = tmp_path / "keys"
    keys.write_text("ann:too-short\n")
    assert main([*line, "--api-keys-file", str(keys)]) == 2
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and "too-short" not in output.err
    assert f"api_keys_file {keys}, line 1: the key has 9 characters" in output.err


@pytest.mark.parametrize("access", [{"api_keys_file": "keys"}, {"allow_no_keys": True}])
def test_with_keys_or_a_word_the_gateway_may_listen_anywhere(
    checkpoint: Path, tmp_path: Path, access: dict[str, Any]
) -> None:
    (tmp_path / "keys").write_text("ann:0123456789abcdef\n")
    if "api_keys_file" in access:
        access = {"api_keys_file": str(tmp_path / "keys")}
    settings = {"model": str(checkpoint), "device": "cpu", "host": "0.0.0.0", **access}
    assert preflight.check_gateway(gateway_settings(resolve(validate(settings, source="test")))) == []


def test_a_bad_setting_ends_the_launch_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "no/such/model", "--device", "cpu"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("launch: error: model is 'no/such/model': no such directory")
    assert output.err.count("\n") == 1


def test_more_ranks_than_gpus_are_found() -> None:
    assert preflight.check_devices("cuda", 8, 8) == []
    assert preflight.check_devices("cpu", 8, 0) == []
    (problem,) = preflight.check_devices("cuda", 8, 2)
    assert "'cuda' with 8 rank(s) on this machine, but the driver shows 2 usable GPU(s)" in problem


def test_a_dry_run_off_the_gpu_machine_prints_the_command_and_warns(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "gpu_devices", lambda: 0)
    arguments = ["--model", str(checkpoint), "--device", "cuda", "--tp", "8"]
    assert main([*arguments, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "--tp-size 8" in printed.out
    assert "launch: warning: device is 'cuda' with 8 rank(s)" in printed.err
    assert main(arguments) == 2
    assert "launch: error: device is 'cuda' with 8 rank(s)" in capsys.readouterr().err


def test_a_dry_run_starts_nothing_and_prints_the_command(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(checkpoint), "--device", "cpu", "--dry-run", "--engine-port", "4321"]) == 0
    output = capsys.readouterr().out
    assert "-m sglang.launch_server" in output
    assert "--port 4321" in output
