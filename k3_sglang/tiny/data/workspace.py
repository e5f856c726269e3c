"""A project directory in memory, with the agent's file tools and `python -m unittest` word for word as they answer."""

from __future__ import annotations

import builtins
import fnmatch
import io
import linecache
import re
import types
import unittest
from collections.abc import Mapping
from typing import Any, Final

TEST_COMMAND: Final = "python -m unittest"
_SECONDS: Final = re.compile(r"(Ran \d+ tests? in )\d+\.\d+s")


class Workspace:
    """Files by path, and what the agent's tools say about them.

    `directory` is where the project pretends to lie: tracebacks name it.
    """

    def __init__(self, files: Mapping[str, str], directory: str) -> None:
        self.files = dict(files)
        self.directory = directory

    def list_files(self) -> str:
        """What `list_files` says of the working directory."""
        lines: dict[str, str] = {}
        for path, text in self.files.items():
            top, below, _ = path.partition("/")
            lines[top] = f"{top}/" if below else f"{top}  {len(text.encode())}"
        return "\n".join(lines[name] for name in sorted(lines)) or "(empty directory)"

    def read_file(self, path: str) -> str:
        """What `read_file` says of a whole file."""
        if path not in self.files:
            return f"{path!r} does not exist"
        return self.files[path] or "(empty file)"

    def write_file(self, path: str, content: str) -> str:
        """Create or replace a file, and what `write_file` says then."""
        done = "Replaced" if path in self.files else "Created"
        self.files[path] = content
        return f"{done} {path} ({len(content.encode())} bytes)."

    def replace_in_file(self, path: str, old: str, new: str) -> str:
        """Replace a text that must occur once, and what `replace_in_file` says then."""
        if path not in self.files:
            return f"{path!r} does not exist"
        count = self.files[path].count(old)
        if count == 0:
            return f"the text was not found in {path!r}; read the file and copy the text exactly"
        if count != 1:
            return (
                f"the text occurs {count} times in {path!r}, expected=1; "
                "give more of the surrounding text, or the right number"
            )
        self.files[path] = self.files[path].replace(old, new)
        return f"Replaced 1 occurrence in {path}."

    def search_files(self, text: str, glob: str = "*") -> str:
        """What `search_files` says of the working directory. Folders are looked into last, the last one first."""
        found: list[str] = []
        names = [path for path in self._walk() if fnmatch.fnmatchcase(path.rpartition("/")[2], glob)]
        for path in names:
            for number, line in enumerate(self.files[path].splitlines(), 1):
                if text in line:
                    found.append(f"{path}:{number}: {line}")
        return "\n".join([*(found or ["(no match)"]), f"[files searched: {len(names)}]"])

    def run_tests(self, seconds: str = "0.000") -> str:
        """What `run_command` says of `python -m unittest`; `seconds` is the time it claims."""
        output, passed = _run_tests(self.files, self.directory)
        text = _SECONDS.sub(rf"\g<1>{seconds}s", output).rstrip("\n")
        return f"{text}\n[exit code {0 if passed else 1}]"

    def _walk(self) -> list[str]:
        return sorted(self.files, key=lambda path: ("/" in path, path))


def _run_tests(files: Mapping[str, str], directory: str) -> tuple[str, bool]:
    """Output of the real test runner on modules made of texts; nothing of them reaches `sys.modules`."""
    loaded: dict[str, types.ModuleType] = {}

    def load(name: str) -> types.ModuleType:
        if name not in loaded:
            loaded[name] = _module(name, files[f"{name}.py"], f"{directory}/{name}.py", find)
        return loaded[name]

    def find(name: str, *arguments: Any, **options: Any) -> Any:
        return load(name) if f"{name}.py" in files else builtins.__import__(name, *arguments, **options)

    suite = unittest.TestSuite()
    for path in sorted(files):
        if fnmatch.fnmatchcase(path, "test*.py"):
            suite.addTest(unittest.defaultTestLoader.loadTestsFromModule(load(path.removesuffix(".py"))))
    stream = io.StringIO()
    result = unittest.TextTestRunner(stream).run(suite)
    for module in loaded.values():
        linecache.cache.pop(str(module.__file__), None)
    return stream.getvalue(), result.wasSuccessful()


def _module(name: str, source: str, file: str, find: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = file
    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": find}
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), module.__dict__)
    return module
