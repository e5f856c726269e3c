"""What the drivers of command-line agents share: prompts, one run of a program, the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

URL = os.environ["CLIENT_URL"]
"""The server, without /v1."""
MODEL = os.environ["CLIENT_MODEL"]
HOME = Path(os.environ["HOME"])
CONTEXT_TOKENS = 131072
"""What the harness serves (``clients/servers.py``); with less, some begin to compact at once."""
FIRST = "What does the file notes.txt say about Oslo? Read it."
SECOND = "And what about Bergen?"


def run(*command: str, also_ends_with: str = "", **environment: str) -> str:
    """Run a program and return what it printed; its end is shown when it fails.

    ``also_ends_with``: what it prints when it ends at a limit that it was given, which is no failure of its server.

    Raises:
        SystemExit: it failed.
    """
    variables = {**os.environ, **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    print(f"$ {' '.join(command)}\n{done.stdout}\n{done.stderr}")
    ended = bool(also_ends_with) and also_ends_with in done.stdout
    if done.returncode != 0 and not ended:
        last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        print(f"{command[0]} ended with exit code {done.returncode}: {last[-1] if last else 'no output'}")
        sys.exit(1)
    return done.stdout


def report(**more: object) -> None:
    """The driver's last line."""
    print(json.dumps(more))
