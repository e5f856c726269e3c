"""Looks into a ledger: ``python -m agent_runtime.ledger sessions|show|check|replay|forget FILE``."""

import argparse
import json
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from agent_runtime.errors import LedgerError
from agent_runtime.gateway.forms import chat_body
from agent_runtime.ledger.reading import LedgerReader
from agent_runtime.ledger.replay import replayed_steps
from agent_runtime.ledger.store import Ledger
from agent_runtime.upstream.again import sent_again

USAGE_ERROR = 2


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns 0, 1 when the ledger is damaged, 2 when it cannot be used."""
    options = _parser().parse_args(arguments)
    try:
        return _COMMANDS[options.command](options)
    except LedgerError as error:
        print(f"ledger: {error}", file=sys.stderr)
        return USAGE_ERROR


def _sessions(options: argparse.Namespace) -> int:
    print("session", "steps", "turns", "first", "last", "owner", "name", sep="\t")
    with LedgerReader(options.file) as reader:
        for session in reader.sessions():
            times = (_time(session.created_ms), _time(session.used_ms))
            print(session.id, session.steps, session.turns, *times, session.owner, session.name, sep="\t")
    return 0


def _show(options: argparse.Namespace) -> int:
    print("step", "time", "prompt tokens", "verdict", "prefix", "turns", sep="\t")
    with LedgerReader(options.file) as reader:
        turns: dict[int, list[str]] = {}
        for record in reader.turns(options.session):
            usage = record.facts["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            text = f"{record.facts['finish']}, {usage['completion_tokens']} tokens, {cached} cached"
            turns.setdefault(record.step, []).append(text)
        for step in reader.steps(options.session):
            replay = step.facts["replay"]
            said = "; ".join(turns.get(step.id, ["none"]))
            print(
                step.id, _time(step.created_ms), step.prompt_tokens, replay["verdict"], _prefix(replay), said, sep="\t"
            )
    return 0


def _prefix(replay: Mapping[str, Any]) -> str:
    prefix = replay.get("prefix")
    if prefix is None:
        return "first"
    if prefix["holds"]:
        return "holds"
    # Before another server messages are compared, and what is lost is counted in bytes of their JSON.
    unit = "tokens" if "lost_tokens" in prefix else "bytes"
    return f"{prefix['moved']}, {prefix[f'lost_{unit}']} {unit} lost"


def _check(options: argparse.Namespace) -> int:
    with LedgerReader(options.file) as reader:
        problems = reader.check()
        steps = sum(1 for _ in reader.steps())
    for problem in problems:
        print(problem)
    print(f"{steps} steps, {len(problems)} problems")
    return 1 if problems else 0


def _replay(options: argparse.Namespace) -> int:
    with LedgerReader(options.file) as reader:
        foreign = {made.step: made for made in sent_again(reader, read=chat_body)}
        for replayed in replayed_steps(reader, options.session):
            made = foreign.get(replayed.step.id)
            if made is not None and not made.same:
                raise LedgerError(f"step {made.step} does not become what was sent; its guard was not in mode repair")
            for body in replayed.engine if made is None else made.bodies:
                sys.stdout.buffer.write(body + b"\n")
    return 0


def _forget(options: argparse.Namespace) -> int:
    with Ledger(options.file) as ledger:
        ledger.forget(options.session)
    print(json.dumps({"forgotten": options.session}))
    return 0


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000).isoformat(" ", "seconds")


_COMMANDS = {"sessions": _sessions, "show": _show, "check": _check, "replay": _replay, "forget": _forget}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m agent_runtime.ledger", description="Look into a ledger.")
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "sessions": "list the sessions",
        "show": "list the steps of a session: tokens, verdict, what the prefix kept",
        "check": "put every body and prompt together again and compare with its digest",
        "replay": "print what the engine or the other server was sent, one JSON body a line",
        "forget": "delete a session; no gateway may be running on the file",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("file", type=Path)
        if name in ("show", "replay", "forget"):
            command.add_argument("session", type=int, nargs="?" if name == "replay" else None)
    return parser


if __name__ == "__main__":
    sys.exit(main())
