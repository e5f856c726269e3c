"""The world of the coding skill: its tools answer like the real ones, and every bug can be found and fixed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent_runtime.tools.files import file_tools
from agent_runtime.tools.registry import Tool
from agent_runtime.tools.result import ToolError, ToolResult
from agent_runtime.tools.shell import shell_tool
from k3_sglang.tiny.data.coding import coding
from k3_sglang.tiny.data.functions import families, function
from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.data.project import Project, project
from k3_sglang.tiny.data.workspace import TEST_COMMAND, Workspace

PYTHON = f"{sys.executable} -B -m unittest"


class Real:
    """The agent's own tools over a directory."""

    def __init__(self, directory: Path) -> None:
        self.tools: dict[str, Tool] = {made.name: made for made in file_tools(directory)}

    def call(self, name: str, **arguments: object) -> str:
        try:
            found = self.tools[name].function(**arguments)
        except ToolError as error:
            return str(error)
        assert isinstance(found, ToolResult)
        return found.model


@pytest.fixture(params=range(4))
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Project, Real, Workspace]:
    found = project(Draw(f"projects/{request.param}", "train"), bugs=1 + request.param % 2)
    for path, text in found.files().items():
        (tmp_path / path).write_text(text, "utf-8")
    return found, Real(tmp_path), Workspace(found.files(), str(tmp_path))


def test_the_file_tools_in_memory_answer_like_the_real_ones(made: tuple[Project, Real, Workspace]) -> None:
    found, real, space = made
    assert space.list_files() == real.call("list_files", path=".")
    for path in (*space.files, "missing.py"):
        assert space.read_file(path) == real.call("read_file", path=path)
    _, bug = found.broken[0]
    name = found.functions[0].name
    assert space.search_files(name) == real.call("search_files", text=name)
    assert space.search_files("nowhere", "*.py") == real.call("search_files", text="nowhere", glob="*.py")
    for old in ("not there", "e", bug.wrong, bug.wrong):
        arguments = {"path": found.source_file, "old": old, "new": bug.right}
        assert space.replace_in_file(**arguments) == real.call("replace_in_file", **arguments)
    for text in ("one", "two\n"):
        assert space.write_file("new.txt", text) == real.call("write_file", path="new.txt", content=text)
    assert space.list_files() == real.call("list_files", path=".")


def test_the_test_run_in_memory_prints_what_a_process_prints(made: tuple[Project, Real, Workspace]) -> None:
    found, _, space = made
    directory = Path(space.directory)
    for step in range(1 + len(found.broken)):
        done = subprocess.run(PYTHON.split(), cwd=directory, capture_output=True, text=True, timeout=60)
        printed = re.sub(r"in \d+\.\d+s", "in 0.000s", done.stdout + done.stderr).rstrip("\n")
        assert space.run_tests() == f"{printed}\n[exit code {done.returncode}]"
        assert (done.returncode == 0) == (step == len(found.broken))
        if step < len(found.broken):
            _, bug = found.broken[step]
            space.replace_in_file(found.source_file, bug.wrong, bug.right)
            (directory / found.source_file).write_text(space.files[found.source_file], "utf-8")


async def test_a_command_says_how_it_ended_in_the_words_of_the_shell_tool(tmp_path: Path) -> None:
    found = await shell_tool(tmp_path).function(command="echo done; exit 1")
    assert found.model == "done\n[exit code 1]"
    assert Workspace({}, "/x").run_tests().endswith("[exit code 0]")


def test_bugs_of_every_family_occur_and_change_what_the_test_sees() -> None:
    functions = [function(Draw(f"families/{number}", "train"), broken=True) for number in range(150)]
    seen = {made.bug.family for made in functions if made.bug}
    assert seen == set(families())
    assert len(seen) >= 10


@pytest.mark.parametrize("number", range(8))
def test_a_session_ends_with_passing_tests_and_learns_no_mistake(number: int) -> None:
    talk = coding(Draw(f"sessions/{number}", "held_out"))
    results = [message["content"] for message in talk.messages if message["role"] == "tool"]
    runs = [text for text in results if "Ran " in text]
    assert "FAILED" in runs[0]
    assert "\nOK\n" in runs[-1]
    for message, weight, result in zip(talk.messages, talk.weights, talk.messages[1:], strict=False):
        if message["role"] == "assistant" and re.search("was not found|does not exist", result["content"]):
            assert weight == 0.0
    calls = [json.dumps(message.get("tool_calls", "")) for message in talk.messages]
    assert sum(TEST_COMMAND in text for text in calls) >= 2
