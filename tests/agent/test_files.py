"""The file tools do their work inside the root and cannot be led out of it."""

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.conversation import ToolCall
from agent_runtime.tools.files import FileLimits, file_tools
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.result import Failure, ToolResult


class Workspace:
    """A root with an outside next to it, and calls as the loop makes them."""

    def __init__(self, base: Path) -> None:
        self.root = base / "root"
        self.outside = base / "outside"
        self.root.mkdir()
        self.outside.mkdir()
        (self.outside / "secret.txt").write_text("secret")
        self.registry = ToolRegistry(file_tools(self.root, FileLimits(file_bytes=5000, entries=3, matches=2)))

    async def call(self, name: str, **arguments: Any) -> ToolResult:
        return await self.registry.execute(ToolCall("id", name, json.dumps(arguments)))

    async def ok(self, name: str, **arguments: Any) -> str:
        result = await self.call(name, **arguments)
        assert result.ok, result
        return result.model

    async def refused(self, name: str, **arguments: Any) -> str:
        result = await self.call(name, **arguments)
        assert result.failure is Failure.REFUSED, result
        return result.model


@pytest.fixture
def space(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


async def test_a_file_is_written_read_changed_and_found(space: Workspace) -> None:
    assert await space.ok("write_file", path="src/a.py", content="x = 1\ny = 2\n") == "Created src/a.py (12 bytes)."
    assert await space.ok("read_file", path="src/a.py") == "x = 1\ny = 2\n"
    assert await space.ok("replace_in_file", path="./src//a.py", old="y = 2", new="y = 3") == (
        "Replaced 1 occurrence in ./src//a.py."
    )
    assert (space.root / "src/a.py").read_text() == "x = 1\ny = 3\n"
    assert "src/a.py:2: y = 3" in await space.ok("search_files", text="Y =", ignore_case=True)
    assert await space.ok("list_files") == "src/"
    assert await space.ok("list_files", path="src") == "a.py  12"
    assert await space.ok("write_file", path="src/a.py", content="") == "Replaced src/a.py (0 bytes)."
    assert await space.ok("read_file", path="src/a.py") == "(empty file)"


async def test_an_absolute_path_below_the_root_is_accepted(space: Workspace) -> None:
    (space.root / "a").write_text("here")
    assert await space.ok("read_file", path=str(space.root / "a")) == "here"


ESCAPES = ["../outside/secret.txt", "a/../../outside/secret.txt", "link/secret.txt", "secret-link", "a/link/secret.txt"]


@pytest.mark.parametrize("path", [*ESCAPES, "{outside}/secret.txt", "{root}/../outside/secret.txt", "{root}x/a"])
@pytest.mark.parametrize("tool", ["read_file", "write_file", "replace_in_file", "list_files", "search_files"])
async def test_no_path_leads_out_of_the_root(space: Workspace, tool: str, path: str) -> None:
    (space.root / "a").mkdir()
    (space.root / "link").symlink_to(space.outside)
    (space.root / "a/link").symlink_to("../../outside")
    (space.root / "secret-link").symlink_to(space.outside / "secret.txt")
    more: dict[str, Any] = {
        "write_file": {"content": "pwned"},
        "replace_in_file": {"old": "secret", "new": "pwned"},
        "search_files": {"text": "secret"},
    }.get(tool, {})
    wanted = path.format(outside=space.outside, root=space.root)
    message = await space.refused(tool, path=wanted, **more)
    assert wanted in message
    assert (space.outside / "secret.txt").read_text() == "secret"
    assert sorted(os.listdir(space.outside)) == ["secret.txt"]


async def test_search_and_listing_do_not_follow_links(space: Workspace) -> None:
    (space.root / "link").symlink_to(space.outside)
    (space.root / "loop").symlink_to(".")
    assert "(no match)" in await space.ok("search_files", text="secret")
    assert "loop -> . (symbolic link, not followed)" in await space.ok("list_files")


async def test_lines_are_numbered_as_tracebacks_do(space: Workspace) -> None:
    text = "one\x0c\u2028still one\r\ntwo\x85\x1cstill two\nthree"
    (space.root / "odd.txt").write_bytes(text.encode())
    assert "odd.txt:3: three" in await space.ok("search_files", text="three")
    assert (await space.ok("read_file", path="odd.txt", start_line=3)).startswith("three\n[lines 3 to 3 of 3")
    assert await space.ok("read_file", path="odd.txt") == text


async def test_a_search_goes_on_past_a_directory_that_vanished(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removed after its parent was listed and before it is opened itself."""
    (space.root / "a").mkdir()
    (space.root / "b").mkdir()
    (space.root / "a/kept.txt").write_text("needle")
    real_open = os.open

    def remove_then_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "b":
            os.rmdir(space.root / "b")
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", remove_then_open)
    found = await space.ok("search_files", text="needle")
    assert "a/kept.txt:1: needle" in found and "unreadable: 1" in found


@pytest.mark.parametrize(("moment", "outcome"), [("d", "symbolic link"), ("secret.txt", "mine")])
async def test_a_directory_swapped_for_a_link_between_check_and_use_is_not_followed(
    space: Workspace, monkeypatch: pytest.MonkeyPatch, moment: str, outcome: str
) -> None:
    """Swapped just before it is opened, the link is refused; swapped after that, the opened directory stays the one."""
    (space.root / "d").mkdir()
    (space.root / "d/secret.txt").write_text("mine")
    real_open = os.open

    def swap_then_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == moment:
            os.rename(space.root / "d", space.root / "moved")
            os.symlink(space.outside, space.root / "d")
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swap_then_open)
    result = await space.call("read_file", path="d/secret.txt")
    assert outcome in result.model and (space.root / "moved").exists()


async def test_what_is_no_text_file_is_refused(space: Workspace) -> None:
    (space.root / "nul").write_bytes(b"a\0b")
    (space.root / "latin").write_bytes("ä".encode("latin-1"))
    (space.root / "big").write_text("x" * 5001)
    os.mkfifo(space.root / "fifo")
    assert "binary file" in await space.refused("read_file", path="nul")
    assert "not UTF-8" in await space.refused("read_file", path="latin")
    assert "5001 bytes; the limit for this tool is 5000" in await space.refused("read_file", path="big")
    assert "not a regular file" in await space.refused("read_file", path="fifo")
    assert "not a regular file" in await space.refused("write_file", path="fifo", content="x")
    (space.root / "folder").mkdir()
    assert "is a directory" in await space.refused("read_file", path="folder")
    assert "working directory itself" in await space.refused("write_file", path=".", content="x")
    assert "does not exist" in await space.refused("read_file", path="absent")
    assert "too long" in await space.refused("read_file", path="n" * 300)
    assert "NUL" in await space.refused("read_file", path="a\0b")
    assert "would have 5001 bytes" in await space.refused("write_file", path="new", content="x" * 5001)
    assert not (space.root / "new").exists()


async def test_the_end_of_a_long_file_is_reached_by_line_numbers(space: Workspace) -> None:
    (space.root / "long").write_text("".join(f"line {n}\n" for n in range(1, 11)))
    first = await space.ok("read_file", path="long", max_lines=4)
    assert first.endswith("line 4\n[lines 1 to 4 of 10; continue with start_line=5]")
    last = await space.ok("read_file", path="long", start_line=9)
    assert last == "line 9\nline 10\n[lines 9 to 10 of 10]"
    assert "start_line=11 is behind its end" in await space.refused("read_file", path="long", start_line=11)


async def test_listings_and_searches_say_what_they_left_out(space: Workspace) -> None:
    for name in "abcd":
        (space.root / name).write_text("needle\n")
    (space.root / "e.bin").write_bytes(b"\0needle")
    assert (await space.ok("list_files")).endswith("[2 more entries not shown]")
    found = await space.ok("search_files", text="needle")
    assert found.count("needle") == 2 and "stopped at 2 matches" in found
    found = await space.ok("search_files", text="needle", glob="*.bin")
    assert "(no match)" in found and "left out because binary, too large or unreadable: 1" in found


@pytest.mark.parametrize(
    ("old", "expected", "words"),
    [("absent", 1, "not found"), ("a", 1, "occurs 3 times"), ("a", 2, "occurs 3 times in 'f', expected=2")],
)
async def test_a_replacement_that_is_not_as_expected_changes_nothing(
    space: Workspace, old: str, expected: int, words: str
) -> None:
    (space.root / "f").write_text("a a a")
    assert words in await space.refused("replace_in_file", path="f", old=old, new="b", expected=expected)
    assert (space.root / "f").read_text() == "a a a"
    assert await space.ok("replace_in_file", path="f", old="a", new="b", expected=3)
    assert (space.root / "f").read_text() == "b b b"


async def test_line_ends_and_permissions_survive_a_replacement(space: Workspace) -> None:
    script = space.root / "run.sh"
    script.write_bytes(b"a\r\nb\r\n")
    script.chmod(0o750)
    await space.ok("replace_in_file", path="run.sh", old="b", new="c")
    assert script.read_bytes() == b"a\r\nc\r\n" and script.stat().st_mode & 0o777 == 0o750


async def test_readers_never_see_half_a_write(space: Workspace) -> None:
    versions = {"old" * 1000, "new" * 1000}
    target = space.root / "f"
    target.write_text("old" * 1000)
    stop = threading.Event()
    seen: set[str] = set()

    def watch() -> None:
        while not stop.is_set():
            seen.add(target.read_text())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for turn in range(100):
            await space.ok("write_file", path="f", content=("old", "new")[turn % 2] * 1000)
            await asyncio.sleep(0)
    finally:
        stop.set()
        watcher.join()
    assert seen <= versions
    assert os.listdir(space.root) == ["f"], "no temporary file may stay"


def test_a_root_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="create it first"):
        file_tools(tmp_path / "absent")
