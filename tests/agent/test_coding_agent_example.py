"""The example runs through with a model that knows what it does, with one that does not, and without a server."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_endpoint import Reply, calls, says, serve

FIX = {"path": "scores.py", "old": "        total -= marble", "new": "        total += marble"}


def run_example(repository: Path, base_url: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-W", "error", "-B", str(repository / "examples/coding_agent.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(repository), "K3_BASE_URL": base_url},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_model_that_can_do_it_really_repairs_the_project(repository: Path, tmp_path: Path) -> None:
    script = [
        calls(("list_files", {}), ("read_file", {"path": "scores.py"}), ids="a"),
        calls(("run_command", {"command": "python -m unittest"}), ids="b"),
        calls(("replace_in_file", FIX), ids="c"),
        calls(("run_command", {"command": "python -m unittest"}), ids="d"),
        says("Fixed."),
    ]
    with serve(*script) as endpoint:
        done = run_example(repository, endpoint.base_url, "--turns", "1", "--workdir", str(tmp_path / "new"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "tests: pass"
    assert any(line.split()[:6] == ["step", "prompt", "cached", "new", "output", "TTFT"] for line in lines)
    assert any("exit code 1" in line for line in lines) and any("exit code 0" in line for line in lines)
    assert "5 steps" in done.stdout and "50.0% of 500 prompt tokens came from the cache" in done.stdout
    assert "completed. Fixed." in done.stdout
    assert "total += marble" in (tmp_path / "new/scores.py").read_text()


def test_a_model_that_writes_nonsense_does_not_stop_the_session(repository: Path) -> None:
    script = [
        calls(("read_file", {"path": "\x00\u001b[31m[bold]"}), ("qzx", "{}"), ids="a"),
        Reply([{"reasoning_content": "hrm"}], "stop"),
        Reply([{"reasoning_content": "hrm again"}], "stop"),
        calls(("write_file", '{"path": "x'), ("run_command", {"command": "(((", "timeout_s": 1}), ids="b"),
        Reply([{"content": "cut"}], "length"),
        calls(("search_files", {"text": "m", "path": "zzz"}), ids="c"),
    ]
    with serve(*script) as endpoint:
        done = run_example(repository, endpoint.base_url, "--turns", "3", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "tests: fail"
    for ending in ("turn 1 ended: empty_answer", "turn 2 ended: truncated", "turn 3 ended: max_steps"):
        assert ending in done.stdout
    assert "\x1b" not in done.stdout and "\x00" not in done.stdout
    sizes = [len(request["messages"]) for request in endpoint.requests]
    assert sizes[1] == sizes[2], "an empty answer is asked for again"
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes) - 1, "the history must grow with every step"


def test_a_full_context_window_ends_the_session_in_good_order(repository: Path) -> None:
    full = Reply(status=400, body={"error": {"message": "too long", "code": "context_length_exceeded"}})
    with serve(says("hi"), full) as endpoint:
        done = run_example(repository, endpoint.base_url)
    assert done.returncode == 0, done.stderr
    assert "turn 2 ended: context_full" in done.stdout
    assert len(endpoint.requests) == 3, "compressing was tried, and did not fit either"


def test_without_a_server_there_is_one_line_that_says_what_to_do(
    repository: Path, free_port: Callable[[], int]
) -> None:
    done = run_example(repository, f"http://127.0.0.1:{free_port()}/v1")
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: nothing answers at http://127.0.0.1:") and "start a server" in done.stderr


@pytest.mark.parametrize("arguments", [["--turns", "0"], ["--nonsense"]])
def test_wrong_arguments_are_refused_before_anything_runs(repository: Path, arguments: list[str]) -> None:
    assert run_example(repository, "http://127.0.0.1:1/v1", *arguments).returncode == 2


def test_the_program_in_the_documentation_runs(repository: Path, tmp_path: Path) -> None:
    document = (repository / "docs/agent.md").read_text("utf-8")
    program = document.partition("```python\n")[2].partition("```")[0]
    with serve(calls(("weather", {"city": "Rome"})), says("It will be dry.")) as endpoint:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program.replace("http://127.0.0.1:30000/v1", endpoint.base_url)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(repository)},
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.stdout == "completed It will be dry.\n", done.stderr
    assert endpoint.requests[1]["messages"][-1]["content"] == '{"city":"Rome","forecast":"dry"}'
