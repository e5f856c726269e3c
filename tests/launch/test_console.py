"""What is printed where: one ready line and tables on stdout, everything else on stderr and in log files."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from k3_sglang.launch import console, report
from k3_sglang.launch.readiness import EngineFacts
from k3_sglang.launch.resolve import resolve
from k3_sglang.launch.settings import SettingsError, validate


def test_only_the_ready_line_of_the_launcher_starts_with_ready(capsys: pytest.CaptureFixture[str]) -> None:
    output = console.Console({})
    output.table([("model", "tiny"), ("ready", "no")])
    output.progress("ready soon")
    output.server_line("engine", "ready or not")
    output.ready("http://x")
    captured = capsys.readouterr()
    assert [line for line in captured.out.splitlines() if line.startswith("ready")] == ["ready http://x"]
    assert not any(line.startswith("ready") for line in captured.err.splitlines())


def test_server_output_is_prefixed_and_copied_to_the_log_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with console.opened(str(tmp_path / "logs"), ("engine", "gateway")) as output:
        output.server_line("engine", "loading")
        output.server_line("gateway", "listening")
    assert capsys.readouterr().err == "engine  | loading\ngateway | listening\n"
    assert (tmp_path / "logs" / "engine.log").read_text(encoding="utf-8") == "loading\n"
    assert (tmp_path / "logs" / "gateway.log").read_text(encoding="utf-8") == "listening\n"


def test_json_lines_of_a_server_pass_and_all_others_become_objects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with console.opened(str(tmp_path), ("engine", "gateway"), as_json=True) as output:
        output.progress("starting")
        output.error("port 1 is taken")
        output.server_line("gateway", '{"level": "info", "message": "x"}')
        output.server_line("engine", "{not JSON")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line.get("logger"), line["level"], line["message"]) for line in lines] == [
        ("launch", "info", "starting"),
        ("launch", "error", "port 1 is taken"),
        (None, "info", "x"),
        ("engine", "info", "{not JSON"),
    ]
    assert (tmp_path / "engine.log").read_text(encoding="utf-8") == "{not JSON\n"


def test_a_log_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(SettingsError, match="log_dir is .*name a folder"),
        console.opened(str(tmp_path / "file"), ("engine",)),
    ):
        pass


def test_the_tables_show_model_device_pools_strategy_and_urls(checkpoint: Path) -> None:
    resolved = resolve(validate({"model": str(checkpoint), "device": "cpu", "port": 4000}, source="test"))
    facts = EngineFacts(
        model={"model_class": "k3_sglang.models.kimi_k3.K3", "dtype": "float32", "device": "cpu"},
        pools={
            "kv_tokens": 65536,
            "kv_bytes": 3 << 20,
            "page_size": 1,
            "state_slots": 128,
            "state_bytes_per_slot": 1536,
            "max_running_requests": 6,
        },
        scheduler_pids=(1,),
        plugin_pids=(1,),
        server={"mamba_radix_cache_strategy": "extra_buffer"},
    )
    rows = dict(report.plan_rows(resolved) + report.running_rows(resolved, facts))
    assert rows["model"].startswith("small-k3 (3 KDA + 1 MLA layers, ")
    assert rows["device"] == "cpu, 1 rank(s)"
    assert rows["images"] == "off: config.json has no vision_config"
    assert rows["KV pool"] == "65536 tokens in pages of 1 (3.0 MiB)"
    assert rows["state pool"] == "128 slots (1.5 KiB each)"
    assert rows["cache strategy"] == "extra_buffer"
    assert rows["running requests"] == "6 (8 asked for; the pools allow no more)"
    assert rows["gateway"] == "http://127.0.0.1:4000/v1"


def test_a_full_disk_ends_the_copy_with_one_message_and_not_the_passing_on(capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:  # every write to it fails with ENOSPC
        output = console.Console({"engine": full})
        output.server_line("engine", "first")
        output.server_line("engine", "second")
        with contextlib.suppress(OSError):
            full.close()  # tries once more to write what is still in its buffer
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "engine  | first"
    assert "log file cannot be written (No space left on device)" in lines[1]
    assert lines[2:] == ["engine  | second"]


def test_a_reader_of_standard_error_that_goes_away_stops_nothing(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from k3_sglang.launch.console import opened\n"
        "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 2)\n"
        "with opened(sys.argv[1], ['engine']) as output:\n"
        "    output.progress('nobody hears this')\n"
        "    output.server_line('engine', 'but this is kept')\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert (tmp_path / "engine.log").read_text(encoding="utf-8") == "but this is kept\n"


@pytest.mark.parametrize(("value", "text"), [(999, "999"), (5_200_000, "5.2M"), (2_779_500_000_000, "2779.5B")])
def test_counts_are_short(value: int, text: str) -> None:
    assert report.count(value) == text
