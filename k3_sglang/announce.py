"""Facts that engine processes tell the launcher: one small JSON file per kind and process, written atomically.

SGLang logs and skips a plugin that fails, so silence must not pass for success: the launcher reports ready only after
the announcements it needs are there. Standard library only, because every engine process imports this first.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

DIRECTORY_VARIABLE = "K3_SGLANG_ANNOUNCE_DIR"
"""Environment variable naming the folder; without it announcements are not written (nobody waits for them)."""

LOADING = "loading"
"""Kind that says how far loading is: ``text`` is for people, ``done`` and ``total`` count tensors."""


@dataclass(frozen=True)
class Announcement:
    """One process's statement."""

    kind: str
    """``plugin``, ``platform``, ``model``, ``pools`` or ``loading``; others are kept but nobody waits for them."""
    pid: int
    time_s: float
    """Unix time of writing."""
    details: dict[str, Any]


def announce(kind: str, **details: Any) -> None:
    """State a fact about this process; a later call with the same kind replaces the earlier one.

    Args:
        kind: letters, digits and underscores; part of the file's name.
        details: JSON values; tensors, dtypes and devices must be turned into text or numbers by the caller.

    Raises:
        ValueError: the kind cannot be part of a file name.
        TypeError: a detail is not a JSON value.
    """
    if not kind.isidentifier():
        raise ValueError(f"announcement kind is {kind!r}; it must consist of letters, digits and underscores")
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return
    pid = os.getpid()
    text = json.dumps({"kind": kind, "pid": pid, "time_s": time.time(), "details": details})
    unfinished = Path(directory) / f".{kind}.{pid}.tmp"
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(Path(directory) / f"{kind}.{pid}.json")


def read_announcements(directory: str | Path) -> list[Announcement]:
    """All announcements in a folder, oldest first.

    Raises:
        ValueError: a file is not an announcement; its name is in the message.
    """
    found = [_read(path) for path in Path(directory).glob("*.json")]
    return sorted(found, key=lambda announcement: (announcement.time_s, announcement.kind, announcement.pid))


def _read(path: Path) -> Announcement:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        details = raw["details"]
        if not isinstance(details, dict):
            raise TypeError("details is not an object")
        return Announcement(str(raw["kind"]), int(raw["pid"]), float(raw["time_s"]), cast("dict[str, Any]", details))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is not an announcement: {error!r}; only announce() may write there") from error
