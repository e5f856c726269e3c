"""Bugs repaired by the agent with its real tools, in scratch directories."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Final

from agent_runtime.engine.openai_chat import ChatClient
from agent_runtime.events import RunResult
from agent_runtime.loop import Agent, AgentOptions, Limits
from agent_runtime.tools.files import file_tools
from agent_runtime.tools.process import run_in_group
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.shell import ShellSettings, shell_tool
from k3_sglang.tiny.data.agent_texts import agent_texts
from k3_sglang.tiny.data.coding import FIX_ASKS, SUM_UP_ASKS
from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.data.project import Project, project
from k3_sglang.tiny.evaluate.outcome import Case

_LIMITS: Final = Limits(max_steps=14)
_TEST_TIMEOUT_S: Final = 30.0
_OUTPUT_BYTES: Final = 10_000


async def repair(client: ChatClient, draw: Draw) -> Case:
    """One project, in one case of five with two bugs; then the user asks for the tests and a summary once more.

    Right is a run that the model ended itself, after which the project's own, untouched tests pass and nothing but the
    module has changed.
    """
    bugs = 2 if draw.chance(0.2) else 1
    made = project(draw, bugs)
    case = Case(greedy=False)  # the directory's name is in the tracebacks
    with tempfile.TemporaryDirectory(prefix="coding-agent-") as temporary:
        directory = Path(temporary)
        for path, text in made.files().items():
            (directory / path).write_text(text, "utf-8")
        agent = _agent(client, directory, f"eval/{draw.name()}{draw.number()}")
        result = await agent.run(draw.pick(FIX_ASKS).format(file=made.source_file))
        case.outputs += [_steps(result), result.text]
        fixed = result.completed and _untouched(made, directory) and await passes(directory)
        for measure in ("coding: bug fixed", f"coding: {'two bugs' if bugs == 2 else 'one bug'} fixed"):
            case.verdicts[measure] = fixed
        for _, bug in made.broken:
            case.verdicts[f"coding, {bug.family}: fixed"] = fixed
        if not fixed:
            case.problem = f"{result.status}: {', '.join(bug.right.strip() for _, bug in made.broken)}"
            return case
        case.verdicts["coding: report names the change"] = _names_changes(made, result)
        last = await agent.run(draw.pick(SUM_UP_ASKS).format(file=made.source_file))
        case.outputs += [_steps(last), last.text]
        case.verdicts["coding: second turn sums up"] = _names_changes(made, last) and _ran_tests(last)
    return case


async def passes(directory: Path) -> bool:
    """Whether the project's tests pass, in a process of their own; one that hangs has failed."""
    finished = await run_in_group(
        [sys.executable, "-B", "-m", "unittest", "-q"],
        directory=directory,
        environment={"PATH": os.environ.get("PATH", os.defpath)},
        timeout_s=_TEST_TIMEOUT_S,
        keep_bytes=_OUTPUT_BYTES,
        max_bytes=_OUTPUT_BYTES,
    )
    return finished.exit_code == 0


def _agent(client: ChatClient, directory: Path, session: str) -> Agent:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    shell = ShellSettings(environment={"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"})
    registry = ToolRegistry([*file_tools(directory), shell_tool(directory, shell)])
    options = AgentOptions(compression=None, session=session)
    return Agent(client, registry, agent_texts().system, limits=_LIMITS, options=options)


def _untouched(made: Project, directory: Path) -> bool:
    """Whether all files but the module are as they were, and there are no others."""
    wanted = {path: text for path, text in made.files().items() if path != made.source_file}
    found = {path.name: path.read_text("utf-8", "replace") for path in directory.iterdir() if path.is_file()}
    found.pop(made.source_file, None)
    return found == wanted


def _names_changes(made: Project, result: RunResult) -> bool:
    return result.completed and all(bug.right.strip() in result.text for _, bug in made.broken)


def _steps(result: RunResult) -> str:
    return "; ".join(f"{run.call.name} {run.call.arguments}" for step in result.steps for run in step.tools)


def _ran_tests(result: RunResult) -> bool:
    return any(run.call.name == "run_command" and run.result.ok for step in result.steps for run in step.tools)
