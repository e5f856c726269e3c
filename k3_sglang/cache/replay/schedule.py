"""From sessions to one ordered list of steps: K sessions at a time, and the token path of every step.

A step's path is its prompt followed by its output. What the model answered is not in the trace; where the next prompt
of the stream contains it (it keeps all blocks and grows by at least the output) the path takes the next prompt's
blocks, otherwise (reasoning dropped, history edited) the output is tokens nobody sends again.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from k3_sglang.cache.replay.traces import BLOCK_TOKENS, MOONCAKE_BLOCK_TOKENS, Request, Session, Stream, Trace

IDS_PER_SESSION = 1 << 32
"""Room for block ids per namespace, so that ids of two sessions never meet."""

Path64 = NDArray[np.int64]
Heads = dict[tuple[tuple[int, int], int], int]
"""(head lengths, place of the block) -> id in the common namespace."""


@dataclass(frozen=True)
class Pacing:
    """How recorded sessions become a load."""

    concurrent: int = 8
    """Sessions open at a time; when one ends, the next begins."""
    max_gap_s: float = 3600.0
    """Pauses between the requests of a session are cut to this length."""
    serial: bool = False
    """A request is finished before the next begins; otherwise running requests overlap as recorded."""
    tokens_per_s: float = 40.0
    """Decode speed assumed for a call without a recorded duration."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One request at its place in the load. Lengths in tokens, times in seconds."""

    index: int
    session: str
    stream: str
    start: float
    end: float
    request: Request
    following: Request | None
    """The request of the stream whose prompt continues this one, if any."""
    tails: tuple[int, int]
    """Ids of the partial last block of this prompt and of the following one; their own where the trace shows none."""
    namespace: int
    head: Path64
    """Ids of the stream's first blocks, as in its first prompt, and ..."""
    shared_head: Path64
    """... their ids in the namespace of all streams with the same head."""
    head_tokens: int
    last_of_stream: bool
    last_of_session: bool

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.request.input_tokens

    @property
    def path_tokens(self) -> int:
        """Tokens whose KV exists when the step ends: prompt and output without the last sampled token."""
        return self.request.input_tokens + max(self.request.output_tokens - 1, 0)

    def blocks(self) -> Path64:
        """Block ids of the whole path in the load's namespace; only full blocks."""
        total = self.path_tokens // BLOCK_TOKENS
        if self.following is not None and self._answer_returns(self.following):
            return self._named(self.following.blocks[:total])
        own = self._named(self.request.blocks)
        return np.concatenate([own, self._fresh(total - len(own))])

    def units(self, grain: int) -> array[int]:
        """The path as the tree's keys: one int per ``grain`` tokens (64: block ids; 1: tokens)."""
        if grain == BLOCK_TOKENS:
            return array("q", self.blocks().tobytes())
        if grain != 1:
            raise ValueError(f"grain is {grain}; allowed: 1 or {BLOCK_TOKENS}")
        return array("q", self._tokens().tobytes())

    def _tokens(self) -> Path64:
        following, total = self.following, self.path_tokens
        if following is not None and self._answer_returns(following):
            return _expand(np.append(self._named(following.blocks), self.tails[1]))[:total]
        known = _expand(np.append(self._named(self.request.blocks), self.tails[0]))[: self.prompt_tokens]
        missing = total - len(known)
        return np.concatenate([known, _expand(self._fresh(-(-missing // BLOCK_TOKENS)))[:missing]])

    def _answer_returns(self, following: Request) -> bool:
        return following.input_tokens >= self.prompt_tokens + self.request.output_tokens

    def _named(self, blocks: NDArray[np.int32]) -> Path64:
        named = blocks.astype(np.int64) + self.namespace
        count = min(len(self.head), len(blocks))
        differs = np.flatnonzero(blocks[:count] != self.head[:count])
        same = int(differs[0]) if len(differs) else count
        named[:same] = self.shared_head[:same]
        return named

    def _fresh(self, count: int) -> Path64:
        """Ids no other step has."""
        return -(np.int64(self.index + 1) << 24) - np.arange(max(count, 0), dtype=np.int64)


def _expand(blocks: Path64) -> Path64:
    return (blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)


def make_steps(
    trace: Trace,
    pacing: Pacing,
    *,
    seed: int = 1,
    sessions: int | None = None,
    max_requests: int | None = None,
) -> list[Step]:
    """Choose sessions, open ``pacing.concurrent`` at a time and put their requests in the order of their start.

    A trace without sessions (Mooncake) keeps its own arrival times; ``sessions`` then counts requests from its start.
    ``max_requests`` cuts every session.
    """
    if trace.format == "mooncake":
        return _open_loop(trace.sessions[:sessions], pacing)
    chosen = list(trace.sessions)
    random.Random(seed).shuffle(chosen)
    heads: Heads = {}
    free_at = [0.0] * pacing.concurrent
    placed: list[Step] = []
    for number, session in enumerate(chosen[:sessions]):
        opened = heapq.heappop(free_at)
        steps = list(_session_steps(session, number, opened, pacing, heads, max_requests))
        heapq.heappush(free_at, max(step.end for step in steps))
        placed += steps
    return _renumber(placed)


def _renumber(placed: list[Step]) -> list[Step]:
    placed.sort(key=lambda step: (step.start, step.index))
    fields = [name for name in Step.__slots__ if name != "index"]
    return [Step(index=i, **{name: getattr(step, name) for name in fields}) for i, step in enumerate(placed)]


def _session_steps(
    session: Session,
    number: int,
    opened: float,
    pacing: Pacing,
    heads: Heads,
    max_requests: int | None,
) -> Iterator[Step]:
    order = sorted(
        ((request.start, row, place) for row, stream in enumerate(session.streams)
         for place, request in enumerate(stream.requests)),
    )[:max_requests]  # fmt: skip
    now, before, finished = opened, order[0][0], opened
    last = {row: place for _, row, place in order}
    starts: list[tuple[float, float, int, int]] = []
    ready = [opened] * len(session.streams)
    for start, row, place in order:
        request = session.streams[row].requests[place]
        # A stream's next request cannot begin before its last answer has ended.
        now = max(now + min(start - before, pacing.max_gap_s), ready[row])
        before = start
        ready[row] = now + (request.duration or request.output_tokens / pacing.tokens_per_s)
        finished = max(finished, ready[row])
        starts.append((now, ready[row], row, place))
    shared = [_shared_head(stream, heads) for stream in session.streams]
    for index, (start, end, row, place) in enumerate(starts):
        stream = session.streams[row]
        request = stream.requests[place]
        nearest = stream.requests[place + 1] if place < last[row] else None
        keeps = nearest is not None and nearest.kept_blocks >= len(request.blocks)
        namespace = (number + 1) * IDS_PER_SESSION
        yield Step(
            index=(number << 20) + index,
            session=session.name,
            stream=stream.name,
            start=start,
            end=end,
            request=request,
            following=nearest if keeps else None,
            tails=(
                _tail(stream, place, last[row], namespace, row),
                _tail(stream, place + 1, last[row], namespace, row),
            ),
            namespace=namespace,
            head=shared[row][0],
            shared_head=shared[row][1],
            head_tokens=stream.head_tokens,
            last_of_stream=place == last[row],
            last_of_session=index == len(starts) - 1,
        )


def _tail(stream: Stream, place: int, last: int, namespace: int, row: int) -> int:
    """Id of the block that request ``place`` of a stream has only a part of."""
    if place < last:
        request, following = stream.requests[place], stream.requests[place + 1]
        full = len(request.blocks)
        if following.kept_blocks >= full < len(following.blocks):
            return int(following.blocks[full]) + namespace
    return namespace + (1 << 31) + (row << 20) + place


def _shared_head(stream: Stream, heads: Heads) -> tuple[Path64, Path64]:
    """The stream's first head blocks: their own ids, and those all streams with the same head lengths share."""
    count = min(stream.head_tokens, stream.requests[0].input_tokens) // BLOCK_TOKENS
    shared = [heads.setdefault((stream.head_key, i), len(heads) + 1) for i in range(count)]
    return stream.requests[0].blocks[:count].astype(np.int64), np.asarray(shared, np.int64)


def _open_loop(sessions: Sequence[Session], pacing: Pacing) -> list[Step]:
    requests = [session.streams[0].requests[0] for session in sessions]
    continued = _continuations(requests)
    for earlier in sorted(continued, reverse=True):
        # An id of fewer than 512 tokens changes when the text goes on; the continuation's blocks are the same tokens.
        blocks = requests[continued[earlier]].blocks[: len(requests[earlier].blocks)]
        requests[earlier] = replace(requests[earlier], blocks=blocks)
    tails = [-(i + 1) for i in range(len(requests))]
    for earlier, later in continued.items():
        full = len(requests[earlier].blocks)
        if full < len(requests[later].blocks):
            tails[earlier] = int(requests[later].blocks[full])
    nothing = np.empty(0, np.int64)
    return [
        Step(
            index=i,
            session=sessions[i].name,
            stream=sessions[i].name,
            start=request.start,
            end=request.start + request.output_tokens / pacing.tokens_per_s,
            request=request,
            following=requests[continued[i]] if i in continued else None,
            tails=(tails[i], tails[continued[i]] if i in continued else 0),
            namespace=0,
            head=nothing,
            shared_head=nothing,
            head_tokens=0,
            last_of_stream=i not in continued,
            last_of_session=i not in continued,
        )
        for i, request in enumerate(requests)
    ]


def _continuations(requests: Sequence[Request]) -> dict[int, int]:
    """Request -> the later request that seems to continue it: the same whole ids, then longer by at least the answer.

    The trace does not name conversations, so this is a guess; a request continues at most one other, the latest.
    """
    per_id = MOONCAKE_BLOCK_TOKENS // BLOCK_TOKENS
    open_ends: dict[int, list[int]] = {}
    found: dict[int, int] = {}
    for later, request in enumerate(requests):
        ids = request.blocks[::per_id]
        for length in range(len(ids), 0, -1):
            waiting = open_ends.get(int(ids[length - 1]), [])
            earlier = next((i for i in reversed(waiting) if _continues(requests[i], request)), None)
            if earlier is not None:
                found[earlier] = later
                waiting.remove(earlier)
                break
        whole = request.input_tokens // MOONCAKE_BLOCK_TOKENS
        if whole:
            open_ends.setdefault(int(request.blocks[whole * per_id - 1]) // per_id * per_id, []).append(later)
    return found


def _continues(earlier: Request, later: Request) -> bool:
    whole = earlier.input_tokens // MOONCAKE_BLOCK_TOKENS * (MOONCAKE_BLOCK_TOKENS // BLOCK_TOKENS)
    grown = later.input_tokens >= earlier.input_tokens + earlier.output_tokens
    return grown and np.array_equal(earlier.blocks[:whole], later.blocks[:whole])
