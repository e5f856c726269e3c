"""Reads ``file://`` images, from folders that the settings allow and from nowhere else."""

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import unquote, urlsplit

from agent_runtime.errors import SettingsError
from k3_sglang.chat.request_fields import shown
from k3_sglang.vision.images import ImageError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO that nobody writes to must fail the check of the file's kind, not block for ever.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_REASONS = {
    errno.ENOENT: "it does not exist",
    errno.ELOOP: "it is a symbolic link, and links are not followed",
    errno.ENOTDIR: "its path leads through a symbolic link or through something that is no folder",
    errno.EACCES: "the server may not read it",
}


class ImageFolders:
    """The folders whose files may be sent as images.

    A path is opened component by component from the folder's descriptor without following links, so neither `..`
    nor a link leads out, not even one that appears between check and use.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        """Raises SettingsError for a folder that is none."""
        self._roots: dict[str, Path] = {}
        for folder in folders:
            real = folder.resolve()
            if not folder.is_absolute() or not real.is_dir():
                raise SettingsError(f"allow_image_files names {str(folder)!r}; allowed: absolute paths of folders")
            # A path may be spelled with the folder's name in the settings or with its real one.
            self._roots[str(folder)] = self._roots[str(real)] = real

    def read(self, url: str, max_bytes: int) -> bytes:
        """Content of the file a URL names.

        Raises:
            ImageError: not below an allowed folder (``image_source_unsupported``), not a readable regular file
                (``image_not_readable``), or larger than ``max_bytes``.
        """
        root, parts = self._below(url)
        try:
            with ExitStack() as opened:
                folder = os.open(root, _FOLDER)
                opened.callback(os.close, folder)
                for part in parts[:-1]:
                    folder = os.open(part, _FOLDER, dir_fd=folder)
                    opened.callback(os.close, folder)
                file = opened.enter_context(os.fdopen(os.open(parts[-1], _FILE, dir_fd=folder), "rb"))
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise _unreadable(url, "it is no regular file")
                data = file.read(max_bytes + 1)
        except OSError as error:
            raise _unreadable(url, _REASONS.get(error.errno or 0, error.strerror)) from error
        if len(data) > max_bytes:
            raise ImageError("image_too_many_bytes", f"{shown(url)} has more than the allowed {max_bytes} bytes")
        return data

    def _below(self, url: str) -> tuple[Path, list[str]]:
        """The allowed folder that a URL's path is spelled with, and the components below it."""
        try:
            split = urlsplit(url)
            path = unquote(split.path, errors="strict")
        except ValueError as error:
            raise _not_allowed(url, f"it is no valid URL ({error})") from error
        if split.netloc not in ("", "localhost") or split.query or split.fragment or "\0" in path:
            raise _not_allowed(url, "a file URL is file:///absolute/path, reserved characters percent-encoded")
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise _not_allowed(url, "its path holds '..'")
        for spelled, root in self._roots.items():
            above = Path(spelled).parts[1:]
            if len(parts) > len(above) and tuple(parts[: len(above)]) == above:
                return root, parts[len(above) :]
        raise _not_allowed(url, "it lies in no folder that this server reads images from (allow_image_files)")


def _not_allowed(url: str, reason: str) -> ImageError:
    return ImageError("image_source_unsupported", f"{shown(url)}: {reason}; send the image as a data URL")


def _unreadable(url: str, reason: str | None) -> ImageError:
    return ImageError("image_not_readable", f"{shown(url)} cannot be read: {reason or 'unknown reason'}")
