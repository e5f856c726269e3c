"""Kills the agent loop with SIGKILL at random moments, again and again, and goes on from its run log.

    python -m benchmarks.agent_crash --kills 1000      # a minute; in a checkout, for the scripted session

Also in the middle of tools, retries and a compression. Every request must come out of the log in the bytes it was sent
in, every call has one result, and what changes something runs once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.agent.crash_session import crash


def main() -> int:
    """Kill and print; fails with an AssertionError that says what was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(crash(Path(folder), options.kills, options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
