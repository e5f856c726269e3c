"""Server-sent events: JSON in, bytes of the stream out."""

import json
from collections.abc import Mapping
from typing import Any

KEEP_ALIVE_COMMENT = b": keep-alive\n\n"
STREAM_HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_LINE_ENDS = {point: f"\\u{point:04x}" for point in (0x85, 0x2028, 0x2029)}


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event, with its ``event:`` line if it has a name.

    Some clients end lines where Unicode does, so those characters are escaped; JSON escapes the others anyway.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS)
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()
