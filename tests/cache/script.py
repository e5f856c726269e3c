"""How the scripts of these tests end: a native library of the engine fails when Python tears down in order."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn


def run_and_leave(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` and end the process at once with its exit code, 1 if it raised."""
    code = 1
    try:
        code = main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
