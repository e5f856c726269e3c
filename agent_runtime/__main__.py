"""`python -m agent_runtime serve|chat|sessions|replay|verify`: agents from the command line."""

from __future__ import annotations

import argparse
import sys

from agent_runtime.command import chat, serve, sessions, verify
from agent_runtime.errors import AgentRuntimeError
from agent_runtime.tools.result import one_line


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    made = argparse.ArgumentParser(prog="python -m agent_runtime", description=(__doc__ or "").partition(": ")[2])
    commands = made.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("serve", help="an agent behind HTTP")
    serve.add_arguments(command)
    command.set_defaults(run=serve.run)
    command = commands.add_parser("chat", help="an agent in the terminal")
    chat.add_arguments(command)
    command.set_defaults(run=chat.run)
    command = commands.add_parser("sessions", help="list sessions")
    sessions.add_folder_argument(command)
    sessions.add_ledger_argument(command)
    command.set_defaults(run=sessions.run_sessions)
    command = commands.add_parser("replay", help="every request of a session again, without a model")
    sessions.add_replay_arguments(command)
    command.set_defaults(run=sessions.run_replay)
    command = commands.add_parser("verify", help="check an endpoint for preserved thinking")
    verify.add_arguments(command)
    command.set_defaults(run=verify.run)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run a command; its exit code."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (AgentRuntimeError, OSError, ValueError) as error:
        print(f"error: {one_line(str(error), 500)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
