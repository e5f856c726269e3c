"""Trace files as sessions of requests: block ids, lengths and times, checked line by line.

Two formats are read, plain or gzipped JSON lines; the first line decides which.

*Coding agent sessions*: one session per line, ``{id, block_size, tool_tokens, system_tokens, requests}``. A request
names its blocks as the first ``keep`` of the previous request plus runs ``[start, count]``; an entry with ``subagent``
holds a stream of its own that starts at its ``t``. Equal block ids are equal tokens within one session only.

*Mooncake*: one request per line, ``{timestamp (ms), input_length, output_length, hash_ids}``, 512 tokens per id, ids
global, no sessions.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 64
MOONCAKE_BLOCK_TOKENS = 512

Format = Literal["sessions", "mooncake"]
Blocks = NDArray[np.int32]
"""Ids of full 64-token blocks, in prompt order."""


class TraceError(ValueError):
    """A trace line that cannot be read; the message names file, line, field and what is allowed."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One model call; times are seconds from session start."""

    start: float
    input_tokens: int
    output_tokens: int
    blocks: Blocks
    kept_blocks: int
    """Leading blocks shared with the previous request of the stream."""
    duration: float
    """Seconds the call took when it was recorded; 0 when unknown."""
    waits_for_tool: bool = False
    """The answer ended with a tool call: the stream comes back by itself."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests of one agent, in order; a sub-agent is a stream of its own."""

    name: str
    head_tokens: int
    """Length of the part every prompt of the stream begins with (tools and system prompt); 0 when unknown."""
    head_key: tuple[int, int]
    """``(tool_tokens, system_tokens)``: sessions with the same pair share the head's content."""
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Session:
    """A recorded session: the main stream first, then its sub-agents."""

    name: str
    streams: tuple[Stream, ...]

    @property
    def num_requests(self) -> int:
        """Model calls of all streams."""
        return sum(len(stream.requests) for stream in self.streams)


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole file. ``shared_ids``: ids mean the same tokens in every session."""

    format: Format
    sessions: tuple[Session, ...]
    shared_ids: bool


def read_trace(path: Path) -> Trace:
    """Read a trace file of either format.

    Raises:
        TraceError: the file is missing or empty, or a line is not of the format.
    """
    lines = list(_json_lines(path))
    if not lines:
        raise TraceError(f"{path} is empty; a trace has one JSON object per line")
    if "hash_ids" in lines[0][1]:
        requests = [_mooncake_session(where, raw) for where, raw in lines]
        return Trace("mooncake", tuple(requests), shared_ids=True)
    return Trace("sessions", tuple(_session(where, raw) for where, raw in lines), shared_ids=False)


def _json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"trace {path} cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        try:
            raw = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"{where} is not JSON: {error.msg}") from error
        if not isinstance(raw, dict):
            raise TraceError(f"{where} is a {type(raw).__name__}; a trace line is a JSON object")
        yield where, raw


def _field(raw: Mapping[str, Any], key: str, where: str, kind: type | tuple[type, ...] = (int, float)) -> Any:
    value = raw.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TraceError(f"{where}: {key} is {value!r}; allowed: {kind}")
    if isinstance(value, int | float) and value < 0:
        raise TraceError(f"{where}: {key} is {value}; it must not be negative")
    return value


# --- coding agent sessions ---------------------------------------------------------------------------------------


def _session(where: str, raw: Mapping[str, Any]) -> Session:
    name = _field(raw, "id", where, str)
    if raw.get("block_size") != BLOCK_TOKENS:
        raise TraceError(f"{where}: block_size is {raw.get('block_size')!r}; allowed: {BLOCK_TOKENS}")
    entries = _field(raw, "requests", where, list)
    streams = [_stream(where, name, raw, [entry for entry in entries if "subagent" not in entry], 0.0)]
    agents = [entry for entry in entries if "subagent" in entry]
    for number, entry in enumerate(agents, 1):
        start = float(_field(entry, "t", where))
        streams.append(_stream(where, f"{name}/{number}", entry, _field(entry, "requests", where, list), start))
    return Session(name, tuple(stream for stream in streams if stream.requests))


def _stream(where: str, name: str, raw: Mapping[str, Any], entries: list[Any], start: float) -> Stream:
    key = (int(_field(raw, "tool_tokens", where)), int(_field(raw, "system_tokens", where)))
    requests: list[Request] = []
    for number, entry in enumerate(entries):
        before = requests[-1].blocks if requests else np.empty(0, np.int32)
        requests.append(_request(f"{where}, {name} request {number}", entry, before, start))
    return Stream(name, sum(key), key, tuple(requests))


def _request(where: str, raw: Mapping[str, Any], before: Blocks, start: float) -> Request:
    input_tokens = int(_field(raw, "input", where))
    keep = int(_field(raw, "keep", where))
    if keep > len(before):
        raise TraceError(f"{where}: keep is {keep}, but the previous request has {len(before)} blocks")
    parts = [before[:keep]]
    for run in _field(raw, "new", where, list):
        if not (isinstance(run, list) and len(run) == 2 and all(isinstance(n, int) and n >= 0 for n in run)):
            raise TraceError(f"{where}: new has {run!r}; a run is [start, count], neither negative")
        parts.append(np.arange(run[0], run[0] + run[1], dtype=np.int32))
    blocks = np.concatenate(parts)
    if len(blocks) != input_tokens // BLOCK_TOKENS:
        raise TraceError(
            f"{where}: {len(blocks)} blocks for input {input_tokens}; there must be {input_tokens // BLOCK_TOKENS}"
        )
    return Request(
        start=start + float(_field(raw, "t", where)),
        input_tokens=input_tokens,
        output_tokens=int(_field(raw, "output", where)),
        blocks=blocks,
        kept_blocks=keep,
        duration=float(_field(raw, "api", where)),
        waits_for_tool=raw.get("stop") == "tool_use",
    )


# --- Mooncake ----------------------------------------------------------------------------------------------------


def _mooncake_session(where: str, raw: Mapping[str, Any]) -> Session:
    """One request as a session of its own: the format does not say which requests belong together."""
    tokens, ids = int(_field(raw, "input_length", where)), _field(raw, "hash_ids", where, list)
    if len(ids) != -(-tokens // MOONCAKE_BLOCK_TOKENS):
        raise TraceError(
            f"{where}: {len(ids)} hash_ids for input_length {tokens}; "
            f"there must be {-(-tokens // MOONCAKE_BLOCK_TOKENS)}, one per {MOONCAKE_BLOCK_TOKENS} tokens"
        )
    if not all(isinstance(value, int) and value >= 0 for value in ids):
        raise TraceError(f"{where}: hash_ids must be integers of at least 0")
    per_id = MOONCAKE_BLOCK_TOKENS // BLOCK_TOKENS
    every = np.asarray(ids, np.int32)[:, None] * per_id + np.arange(per_id, dtype=np.int32)
    request = Request(
        start=float(_field(raw, "timestamp", where)) / 1000.0,
        input_tokens=tokens,
        output_tokens=int(_field(raw, "output_length", where)),
        blocks=every.reshape(-1)[: tokens // BLOCK_TOKENS],
        kept_blocks=0,
        duration=0.0,
    )
    return Session(where, (Stream(where, 0, (0, 0), (request,)),))
