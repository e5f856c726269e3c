"""File access that cannot leave one directory: paths are walked from its descriptor, no link is followed."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent_runtime.tools.result import ToolError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO that nobody writes to must fail the file-type check below, not block for ever.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Entry:
    """One directory entry. `size_bytes` is that of a file; `target` is set for a symbolic link."""

    name: str
    is_dir: bool
    size_bytes: int
    target: str | None


class ConfinedRoot:
    """The one directory that file tools see.

    Components are opened one after the other relative to their parent's descriptor with O_NOFOLLOW, so
    neither `..` nor a symbolic link leads out, not even one that appears between check and use. Hard links
    cannot be told from files. All methods raise `ToolError` with a sentence for the model.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """
        Raises:
            NotADirectoryError: `root` is not an existing directory.
        """
        self.path = Path(root).resolve()
        if not self.path.is_dir():
            raise NotADirectoryError(f"tool root {str(root)!r} is not a directory; create it first")

    def parts(self, path: str) -> tuple[str, ...]:
        """The components of `path` below the root; an absolute path must be spelled with the root before
        it."""
        if "\0" in path:
            raise ToolError(f"path {path!r} contains a NUL character")
        relative = path
        if path.startswith("/"):
            below = os.path.normpath(path) == str(self.path) or path.startswith(f"{self.path}/")
            if not below:
                raise ToolError(f"path {path!r} is outside of the working directory; use a path relative to it")
            relative = path[len(str(self.path)) :]
        parts = tuple(part for part in relative.split("/") if part not in ("", "."))
        if ".." in parts:
            raise ToolError(f"path {path!r} contains '..'; use a path relative to the working directory")
        return parts

    @contextmanager
    def directory(self, path: str, *, create: bool = False) -> Generator[int]:
        """A descriptor of the directory at `path`; with `create`, missing directories are made."""
        with self._walk(path, self.parts(path), create=create) as descriptor:
            yield descriptor

    @contextmanager
    def _walk(self, path: str, parts: tuple[str, ...], *, create: bool = False) -> Generator[int]:
        descriptor = os.open(self.path, _DIRECTORY)
        try:
            for part in parts:
                with _explained(path):
                    if create:
                        _make_directory(part, descriptor)
                    child = os.open(part, _DIRECTORY, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = child
            yield descriptor
        finally:
            os.close(descriptor)

    def read_bytes(self, path: str, limit_bytes: int) -> bytes:
        """The content of the regular file at `path`, which may have up to `limit_bytes`."""
        *parents, name = self._file_parts(path)
        with self._walk(path, tuple(parents)) as parent:
            return read_file_at(parent, name, path, limit_bytes)

    def write_bytes(self, path: str, content: bytes) -> bool:
        """Replace or create the file at `path` atomically, making missing directories; whether it is new.

        Readers see the old content or the new, never a part. An existing file keeps its permission bits.
        """
        *parents, name = self._file_parts(path)
        with self._walk(path, tuple(parents), create=True) as parent, _explained(path):
            old = _stat_or_none(name, parent)
            if old is not None and not stat.S_ISREG(old.st_mode):
                raise ToolError(f"{path!r} is not a regular file and was not written")
            # Creation with 0o666 lets the umask decide, as for any new file.
            temporary = f".{secrets.token_hex(8)}.tmp"
            created = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=parent)
            try:
                with os.fdopen(created, "wb") as stream:
                    if old is not None:
                        os.fchmod(stream.fileno(), stat.S_IMODE(old.st_mode))
                    stream.write(content)
                os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                os.unlink(temporary, dir_fd=parent)
                raise
            return old is None

    def entries(self, path: str) -> list[Entry]:
        """The entries of the directory at `path`, sorted by name."""
        with self.directory(path) as descriptor, _explained(path):
            return list_entries(descriptor)

    def _file_parts(self, path: str) -> tuple[str, ...]:
        parts = self.parts(path)
        if not parts:
            raise ToolError(f"path {path!r} is the working directory itself; name a file in it")
        return parts


def read_file_at(directory: int, name: str, shown_path: str, limit_bytes: int) -> bytes:
    """The content of a regular file in an open directory; `shown_path` is what messages call it."""
    with _explained(shown_path):
        descriptor = os.open(name, _FILE, dir_fd=directory)
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode):
        os.close(descriptor)
        kind = "a directory; name a file in it" if stat.S_ISDIR(state.st_mode) else "not a regular file"
        raise ToolError(f"{shown_path!r} is {kind}")
    with os.fdopen(descriptor, "rb") as stream:
        content = stream.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise ToolError(f"{shown_path!r} has {state.st_size} bytes; the limit for this tool is {limit_bytes}")
    return content


def list_entries(directory: int) -> list[Entry]:
    """The entries of an open directory, sorted by name. An entry that vanishes meanwhile is left out."""
    found: list[Entry] = []
    for name in sorted(os.listdir(directory)):
        state = _stat_or_none(name, directory)
        if state is not None:
            link = os.readlink(name, dir_fd=directory) if stat.S_ISLNK(state.st_mode) else None
            found.append(Entry(name, stat.S_ISDIR(state.st_mode), state.st_size, link))
    return found


def _stat_or_none(name: str, directory: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _make_directory(name: str, parent: int) -> None:
    try:
        os.mkdir(name, dir_fd=parent)
    except FileExistsError:
        return


@contextmanager
def _explained(path: str) -> Generator[None]:
    """Turn the operating system's answer into a sentence about `path`."""
    reasons = {
        errno.ENOENT: "does not exist",
        errno.ELOOP: "leads through a symbolic link, which this tool does not follow",
        errno.ENOTDIR: "leads through something that is not a directory, or through a symbolic link",
        errno.EISDIR: "is a directory",
        errno.EACCES: "may not be accessed (permission denied)",
        errno.ENAMETOOLONG: "has a name that is too long",
    }
    try:
        yield
    except (OSError, UnicodeEncodeError) as error:
        reason = reasons.get(error.errno or 0) if isinstance(error, OSError) else "is not a valid file name"
        raise ToolError(f"{path!r} {reason or f'cannot be used: {error}'}", debug=repr(error)) from error
