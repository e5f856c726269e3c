"""`sessions` and `replay`: what run logs and a gateway's ledger hold, and every request again from one."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent_runtime.conversation import ConversationError
from agent_runtime.ledger.__main__ import main as ledger_command
from agent_runtime.replay import ReplayedRequest, replay
from agent_runtime.resume import recover
from agent_runtime.runstore import RunLogError, read_run_log

SUFFIX = ".jsonl"
_DATABASE = b"SQLite format 3\0"


def default_folder() -> Path:
    """Where sessions are kept unless told otherwise."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "k3-agent" / "sessions"


def add_folder_argument(parser: argparse.ArgumentParser) -> None:
    """The argument that names the folder of sessions."""
    parser.add_argument("--folder", type=Path, default=default_folder(), help="folder of run logs (%(default)s)")


def add_ledger_argument(parser: argparse.ArgumentParser) -> None:
    """The argument that names a ledger instead."""
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="the ledger of a gateway instead of run logs")


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `replay`."""
    parser.add_argument("log", type=Path, help="a run log, or the ledger of a gateway")
    parser.add_argument("--request", type=int, help="print this request, counted from 1, as JSON")


def is_ledger(path: Path) -> bool:
    """Whether a file is a gateway's ledger, which is a database. Raises OSError when it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(_DATABASE)) == _DATABASE


def _replay_ledger(options: argparse.Namespace) -> int:
    if options.request is not None:
        print("error: --request is for run logs; python -m agent_runtime.ledger replay prints those of a ledger")
        return 2
    return ledger_command(["check", str(options.log)])


def run_sessions(options: argparse.Namespace) -> int:
    """List the run logs of a folder, or the sessions of a ledger."""
    if options.ledger is not None:
        return ledger_command(["sessions", str(options.ledger)])
    table = Table("session", "status", "messages", "window", "steps of the last run", "answer tokens")
    for path in sorted(options.folder.glob(f"*{SUFFIX}")):
        try:
            state = recover(read_run_log(path))
        except (RunLogError, ConversationError, OSError) as error:
            table.add_row(path.stem, f"unreadable: {error}")
            continue
        status = "unfinished" if state.unfinished else state.status or "no run"
        tokens = sum(record.completion_tokens or 0 for record in state.records)
        facts = (state.logged_messages, state.window.number + 1, len(state.records), tokens)
        table.add_row(path.stem, status, *map(str, facts))
    Console(highlight=False).print(table)
    return 0


def run_replay(options: argparse.Namespace) -> int:
    """0 when every request of the log comes out in the bytes it was sent in, 1 when not."""
    try:
        if is_ledger(options.log):
            return _replay_ledger(options)
        requests: list[ReplayedRequest] = list(replay(read_run_log(options.log)))
    except (RunLogError, OSError) as error:
        print(f"error: {error}")
        return 2
    number: int | None = options.request
    if number is not None:
        if not 1 <= number <= len(requests):
            print(f"error: the log has requests 1 to {len(requests)}, not {number}")
            return 2
        chosen = requests[number - 1]
        body = {"messages": chosen.messages, "tools": chosen.tools, **chosen.options}
        print(json.dumps(body, ensure_ascii=False))
        return 0
    for request in requests:
        same = "exact" if request.exact else "DIFFERENT"
        print(f"{request.number}\t{request.purpose}\t{len(request.messages)} messages\t{same}")
    wrong = sum(not request.exact for request in requests)
    print(f"{len(requests)} requests, {wrong} different")
    return 1 if wrong else 0
