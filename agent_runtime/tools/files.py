"""File tools: list, read, write, replace and search inside one root directory."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from os import PathLike
from typing import Annotated, Final

from pydantic import Field

from agent_runtime.tools.confined import ConfinedRoot, Entry
from agent_runtime.tools.registry import Tool, tool
from agent_runtime.tools.result import ToolError, ToolResult

_SKIPPED_DIRECTORIES: Final = frozenset({".git", "__pycache__", "node_modules"})
_BINARY_PROBE_BYTES: Final = 8192

Path = Annotated[str, Field(description="Path relative to the working directory.", min_length=1)]


@dataclass(frozen=True, slots=True)
class FileLimits:
    """What one call may read, write and return."""

    file_bytes: int = 2 * 1024 * 1024
    """Largest file that is read or written."""
    entries: int = 500
    """Directory entries returned by one listing."""
    matches: int = 200
    """Matching lines returned by one search."""
    line_chars: int = 300
    """Characters of a matching line that are shown."""
    searched_files: int = 20_000
    """Files one search looks into before it gives up."""


def file_tools(root: str | PathLike[str], limits: FileLimits | None = None) -> list[Tool]:
    """The file tools over `root`.

    Raises:
        NotADirectoryError: `root` is not an existing directory.
    """
    files = _Files(ConfinedRoot(root), limits or FileLimits())
    changing = tool(parallel=False)
    return [
        tool(files.list_files),
        tool(files.read_file),
        tool(files.search_files),
        changing(files.write_file),
        changing(files.replace_in_file),
    ]


class _Files:
    """The tools' functions; their docstrings are what the model reads."""

    def __init__(self, root: ConfinedRoot, limits: FileLimits) -> None:
        self._root = root
        self._limits = limits

    def list_files(self, path: Path = ".") -> ToolResult:
        """List one directory: directories end in '/', files show their size in bytes."""
        entries = self._root.entries(path)
        lines: list[str] = []
        for entry in entries[: self._limits.entries]:
            if entry.target is not None:
                lines.append(f"{entry.name} -> {entry.target} (symbolic link, not followed)")
            else:
                lines.append(f"{entry.name}/" if entry.is_dir else f"{entry.name}  {entry.size_bytes}")
        if len(entries) > len(lines):
            lines.append(f"[{len(entries) - len(lines)} more entries not shown]")
        return ToolResult("\n".join(lines) or "(empty directory)", f"{path}, entries: {len(entries)}")

    def read_file(
        self,
        path: Path,
        start_line: Annotated[int, Field(ge=1, description="First line to return, counted from 1.")] = 1,
        max_lines: Annotated[int, Field(ge=1, description="Most lines to return.")] = 1000,
    ) -> ToolResult:
        """Read a UTF-8 text file, whole or from a given line on."""
        lines = _lines(self._read_text(path))
        if start_line > max(1, len(lines)):
            raise ToolError(f"{path!r} has {len(lines)} lines; start_line={start_line} is behind its end")
        chosen = lines[start_line - 1 :][:max_lines]
        last = start_line - 1 + len(chosen)
        text = "".join(chosen) or "(empty file)"
        if start_line > 1 or last < len(lines):
            more = f"; continue with start_line={last + 1}" if last < len(lines) else ""
            text = f"{text.rstrip(chr(10))}\n[lines {start_line} to {last} of {len(lines)}{more}]"
        return ToolResult(text, f"{path}, lines read: {len(chosen)}")

    def write_file(
        self, path: Path, content: Annotated[str, Field(description="The complete new content.")]
    ) -> ToolResult:
        """Create a file or replace all of it; missing directories are created."""
        raw = self._encoded(path, content)
        created = self._root.write_bytes(path, raw)
        done = f"{'Created' if created else 'Replaced'} {path} ({len(raw)} bytes)."
        return ToolResult(done)

    def replace_in_file(
        self,
        path: Path,
        old: Annotated[str, Field(description="Exact text to replace, with its white space.", min_length=1)],
        new: Annotated[str, Field(description="Text to put in its place.")],
        expected: Annotated[int, Field(ge=1, description="How often `old` must occur; all are replaced.")] = 1,
    ) -> ToolResult:
        """Replace exact text in a file. Nothing changes unless the text occurs exactly as often as
        expected."""
        text = self._read_text(path)
        count = text.count(old)
        if count == 0:
            raise ToolError(f"the text was not found in {path!r}; read the file and copy the text exactly")
        if count != expected:
            raise ToolError(
                f"the text occurs {count} times in {path!r}, expected={expected}; "
                "give more of the surrounding text, or the right number"
            )
        self._root.write_bytes(path, self._encoded(path, text.replace(old, new)))
        return ToolResult(f"Replaced {count} occurrence{'s' if count > 1 else ''} in {path}.")

    def search_files(
        self,
        text: Annotated[str, Field(description="Text to look for, taken literally.", min_length=1)],
        path: Annotated[str, Field(description="Directory to search, relative to the working directory.")] = ".",
        glob: Annotated[str, Field(description="Only files whose name fits, for example '*.py'.")] = "*",
        ignore_case: Annotated[bool, Field(description="Whether capital letters make no difference.")] = False,
    ) -> ToolResult:
        """Find the lines that contain a text in all text files below a directory.

        Binary files, large files, symbolic links, .git, __pycache__ and node_modules are left out.
        """
        # Literal on purpose: a regular expression from outside can hold the interpreter for ever.
        needle = text.casefold() if ignore_case else text
        matches: list[str] = []
        searched = skipped = 0
        for name, content in self._text_files(path, glob):
            if content is None:
                skipped += 1
                continue
            searched += 1
            for number, whole in enumerate(_lines(content), start=1):
                line = whole.rstrip("\r\n")
                if needle in (line.casefold() if ignore_case else line):
                    matches.append(f"{name}:{number}: {line[: self._limits.line_chars]}")
            if len(matches) > self._limits.matches or searched + skipped >= self._limits.searched_files:
                break
        return self._search_result(matches, searched, skipped)

    def _search_result(self, matches: list[str], searched: int, skipped: int) -> ToolResult:
        limits = self._limits
        notes = [f"files searched: {searched}"]
        if skipped:
            notes.append(f"left out because binary, too large or unreadable: {skipped}")
        if len(matches) > limits.matches:
            notes.append(f"stopped at {limits.matches} matches; narrow the search")
        if searched + skipped >= limits.searched_files:
            notes.append(f"stopped at {limits.searched_files} files; narrow the search")
        shown = matches[: limits.matches] or ["(no match)"]
        return ToolResult("\n".join([*shown, f"[{'; '.join(notes)}]"]), f"matching lines: {len(matches)}")

    def _text_files(self, path: str, glob: str) -> Iterator[tuple[str, str | None]]:
        """Name and text of every file below `path`, in a stable order; None for what cannot be read as text."""
        start = "/".join(self._root.parts(path))
        pending = [start]
        while pending:
            folder = pending.pop()
            entries = self._entries_or_none(folder, must_exist=folder == start)
            if entries is None:
                yield f"{folder}/", None
                continue
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.target is not None:
                    continue
                if entry.is_dir:
                    if entry.name not in _SKIPPED_DIRECTORIES:
                        pending.append(name)
                elif fnmatch.fnmatchcase(entry.name, glob):
                    yield name, self._text_or_none(name)

    def _entries_or_none(self, folder: str, *, must_exist: bool) -> list[Entry] | None:
        """Entries of a directory; None for one that cannot be read or has gone since it was listed."""
        try:
            return self._root.entries(folder)
        except ToolError:
            if must_exist:
                raise
            return None

    def _text_or_none(self, path: str) -> str | None:
        try:
            return self._read_text(path)
        except ToolError:
            return None

    def _read_text(self, path: str) -> str:
        return _decoded(path, self._root.read_bytes(path, self._limits.file_bytes))

    def _encoded(self, path: str, content: str) -> bytes:
        raw = content.encode("utf-8")
        if len(raw) > self._limits.file_bytes:
            raise ToolError(
                f"{path!r} would have {len(raw)} bytes; the limit for this tool is {self._limits.file_bytes}"
            )
        return raw


def _lines(text: str) -> list[str]:
    """Lines with their ends, numbered as compilers and tracebacks do: a form feed or U+2028 ends none."""
    return list(StringIO(text, newline=""))


def _decoded(path: str, raw: bytes) -> str:
    try:
        if b"\0" in raw[:_BINARY_PROBE_BYTES]:
            raise UnicodeError("NUL byte")
        return raw.decode("utf-8")
    except UnicodeError as error:
        raise ToolError(f"{path!r} is a binary file or not UTF-8; this tool handles text only") from error
