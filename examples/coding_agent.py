"""A coding session of several turns against a K3 endpoint: the agent repairs a small project with file and shell tools.

Prints one line per step: tokens of the prompt, how many of them came from the cache, tokens of the answer, time to
the first token, and the tool that was called.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from sample_project import TASKS, tests_pass, write_sample_project
from step_table import StepTable

from agent_runtime.engine.chat_errors import ChatError
from agent_runtime.engine.openai_chat import ChatClient, ChatSettings
from agent_runtime.events import Event, RunStatus, StepFinished
from agent_runtime.loop import Agent, Limits
from agent_runtime.tools.files import file_tools
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.result import one_line
from agent_runtime.tools.shell import ShellSettings, shell_tool

DEFAULT_BASE_URL = "http://127.0.0.1:30000/v1"

# Nothing in here may change between sessions (no date, no path): it opens every prompt and stays in the cache.
SYSTEM = """You are a careful software engineer working in one project directory.
Use the tools to look at the files before you change them, make the smallest change that does the job, and run the \
tests after each change. Paths are relative to the project directory. When the task is done, say so in plain text \
without calling a tool."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line of the example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", default=os.environ.get("K3_BASE_URL", DEFAULT_BASE_URL))
    parser.add_argument("--model", help="served model; default: the first the endpoint lists")
    parser.add_argument("--turns", type=_positive, default=len(TASKS), help="user messages in the session")
    parser.add_argument("--steps", type=_positive, default=12, help="most model calls per user message")
    parser.add_argument("--max-output-tokens", type=_positive, help="limit per answer; default: the endpoint's")
    parser.add_argument("--temperature", type=float, help="default: the endpoint's")
    parser.add_argument("--workdir", type=Path, help="project to work on; default: a temporary one, deleted afterwards")
    return parser.parse_args(arguments)


async def run_session(options: argparse.Namespace, workdir: Path, console: Console) -> None:
    """Run all user turns in one conversation and print the table.

    Raises:
        ChatError: a model call failed.
    """
    # Commands find the interpreter that runs this example as `python`.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    shell = ShellSettings(environment={"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"})
    registry = ToolRegistry([*file_tools(workdir), shell_tool(workdir, shell)])
    settings = ChatSettings(
        model=options.model, max_output_tokens=options.max_output_tokens, temperature=options.temperature
    )
    table = StepTable(console)
    started = time.monotonic()

    def show(event: Event) -> None:
        if isinstance(event, StepFinished):
            table.add(event.record)

    async with ChatClient(options.base_url, settings=settings) as client:
        model = options.model or ", ".join(await client.models())
        say(console, f"model {model} at {options.base_url}, project in {workdir}")
        agent = Agent(client, registry, SYSTEM, limits=Limits(max_steps=options.steps))
        table.header()
        for turn in range(options.turns):
            task = TASKS[turn % len(TASKS)]
            say(console, f"turn {turn + 1}: {one_line(task)}")
            result = await agent.run(task, on_event=show)
            say(console, f"turn {turn + 1} ended: {result.status}. {one_line(result.text)}".rstrip())
            if result.status is RunStatus.CONTEXT_FULL:
                say(console, "the conversation fills the model's context window; no further turn is possible")
                break
    table.totals(time.monotonic() - started)


def say(console: Console, text: str) -> None:
    """Print text that may hold anything a model wrote."""
    visible = "".join(char if char.isprintable() else "?" for char in text)
    console.print(visible, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def project_directory(wanted: Path | None) -> Iterator[Path]:
    """The directory to work in; the sample project is written when it is temporary, new or empty."""
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="coding-agent-") as temporary:
            write_sample_project(Path(temporary))
            yield Path(temporary)
        return
    wanted.mkdir(parents=True, exist_ok=True)
    if not any(wanted.iterdir()):
        write_sample_project(wanted)
    yield wanted


def main() -> int:
    """Run the example; 0 when the session ran through, 1 when the endpoint or the directory failed."""
    options = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        with project_directory(options.workdir) as workdir:
            asyncio.run(run_session(options, workdir, console))
            say(console, f"tests: {'pass' if tests_pass(workdir) else 'fail'}")
    except (ChatError, OSError) as error:
        print(f"error: {one_line(str(error), 500)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
