"""`python -m agent_runtime`: chat, sessions, replay, serve and verify, as processes of their own."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from agent_runtime.__main__ import main, parser
from agent_runtime.runstore import read_run_log
from tests.agent.scripted_endpoint import Reply, calls, says, serve

COMMAND = [sys.executable, "-m", "agent_runtime"]


@pytest.fixture
def environment(repository: Path, tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(repository),
        "XDG_STATE_HOME": str(tmp_path),
        "COLUMNS": "200",
        "TERM": "dumb",
    }


def chat(base_url: str, typed: str, environment: dict[str, str], *more: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "chat", "--base-url", base_url, "--session", "s", *more]
    return subprocess.run(command, input=typed, env=environment, capture_output=True, text=True, timeout=60)


def test_a_chat_shows_thinking_text_and_tools_and_can_be_gone_on_with(
    environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "w"
    work.mkdir()
    script = [
        calls(("write_file", {"path": "a.txt", "content": "x"})),
        says("Written [bold]\x1b[31mred"),
        says("Yes."),
    ]
    with serve(*script) as endpoint:
        first = chat(endpoint.base_url, "write\ny\n", environment, "--workdir", str(work))
        second = chat(endpoint.base_url, "did you?\n", environment, "--workdir", str(work))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert (work / "a.txt").read_text() == "x"
    assert "run it? [y/N]" in first.stdout and "← Created a.txt (1 bytes)." in first.stdout
    assert "Written [bold]\ufffd[31mred" in first.stdout and "\x1b[31m" not in first.stdout, "a model cannot colour us"
    assert endpoint.requests[2]["messages"][:4] == endpoint.requests[1]["messages"]
    folder = tmp_path / "k3-agent" / "sessions"
    assert main(["sessions", "--folder", str(folder)]) == 0 and "completed" in capsys.readouterr().out
    assert main(["replay", str(folder / "s.jsonl")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 requests, 0 different"
    assert main(["replay", str(folder / "s.jsonl"), "--request", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["messages"] == endpoint.requests[1]["messages"]


def test_no_answer_to_the_question_is_a_no(environment: dict[str, str], tmp_path: Path) -> None:
    script = [calls(("run_command", {"command": "touch x"})), says("Pity.")]
    with serve(*script) as endpoint:
        done = chat(endpoint.base_url, "go\n", environment, "--workdir", str(tmp_path))
    assert done.returncode == 0 and not (tmp_path / "x").exists()
    assert "run_command was not run: it was not approved" in endpoint.requests[1]["messages"][-1]["content"]


def test_a_log_that_was_changed_does_not_replay(tmp_path: Path, environment: dict[str, str]) -> None:
    with serve(says("hello")) as endpoint:
        chat(endpoint.base_url, "hi\n", environment)
    log = tmp_path / "k3-agent" / "sessions" / "s.jsonl"
    assert [e["kind"] for e in read_run_log(log)][-1] == "end"
    log.write_text(log.read_text().replace('"content":"hi"', '"content":"ho"'))
    assert main(["replay", str(log)]) == 1


def test_what_cannot_be_done_is_one_line_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], free_port: Callable[[], int]
) -> None:
    assert main(["replay", str(tmp_path / "nothing")]) == 2
    (tmp_path / "log").write_text('{"kind": "open", "version": 1, "session": "s", "tools": []}\n')
    assert main(["replay", str(tmp_path / "log"), "--request", "1"]) == 2
    assert "the log has requests 1 to 0, not 1" in capsys.readouterr().out
    assert main(["verify", f"http://127.0.0.1:{free_port()}/v1"]) == 2
    assert main(["chat", "--base-url", "http://127.0.0.1:9/v1", "--workdir", "/no/such/folder"]) == 1
    assert "is not a directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser().parse_args(["nonsense"])


def test_an_unreadable_session_is_listed_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text("{broken}\n")
    assert main(["sessions", "--folder", str(tmp_path)]) == 0
    assert "unreadable" in capsys.readouterr().out


def test_verify_prints_its_findings(capsys: pytest.CaptureFixture[str]) -> None:
    """An endpoint that answers whole and counts nothing of the thinking."""
    body = {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "1"}}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
    }
    with serve(Reply(status=201, body=body)) as endpoint:
        assert main(["verify", endpoint.base_url, "--model", "m"]) == 1
    out = capsys.readouterr().out
    assert "verdict: dropped" in out and len(endpoint.requests) == 6


def test_serve_runs_until_it_is_interrupted(environment: dict[str, str], tmp_path: Path) -> None:
    with serve(says("hello")) as endpoint:
        command = [*COMMAND, "serve", "--base-url", endpoint.base_url, "--port", "0", "--workdir", str(tmp_path)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+), tools: .*read_file", line)
            assert found is not None, line
            with httpx.Client(trust_env=False, timeout=30) as client:
                answer = client.post(f"http://127.0.0.1:{found.group(1)}/run", json={"task": "hi"}).json()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) in (0, 130)
    assert answer["text"] == "hello"
    assert endpoint.requests[0]["messages"][0]["role"] == "system"
