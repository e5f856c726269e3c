"""The runtime is light: importing it loads neither torch nor sglang and does nothing."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib, pkgutil, sys, threading
import agent_runtime
names = [m.name for m in pkgutil.walk_packages(agent_runtime.__path__, "agent_runtime.") if "__main__" not in m.name]
for name in names:
    importlib.import_module(name)
heavy = sorted(m for m in sys.modules if m.partition(".")[0] in {"torch", "sglang", "transformers", "numpy"})
assert not heavy, heavy
assert threading.active_count() == 1
print(len(names))
"""


def test_importing_every_module_loads_nothing_heavy_and_prints_nothing(repository: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-B", "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10 and done.stderr == ""
    assert list(tmp_path.iterdir()) == []
