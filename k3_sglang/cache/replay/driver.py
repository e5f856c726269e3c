"""Re-enacts the engine's loop on a real cache: match, copy the state, extend by chunks, donate, decode, finish.

The calls into the cache are SGLang's own helpers in the scheduler's order; only the forward passes are missing. A
request takes its prefill in no time and holds its row, slots and locks until the recorded end of the call.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

from k3_sglang import compat
from k3_sglang.cache.replay.budget import Budget
from k3_sglang.cache.replay.rig import Rig
from k3_sglang.cache.replay.schedule import Step

R = TypeVar("R")
"""A running request as its loop sees it."""


@dataclass(frozen=True, slots=True)
class Served:
    """What one request found in the cache; tokens."""

    prompt_tokens: int
    hit_tokens: int
    kv_hit_tokens: int
    """How far the KV went: beyond ``hit_tokens`` only a state was missing."""
    chunks: int = 1

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return self.prompt_tokens - self.hit_tokens


class BudgetError(ValueError):
    """A request that does not fit into the pools even when they are empty."""


@dataclass(eq=False)
class ReplayRequest:
    """The fields of the engine's request that the cache reads; lengths in units."""

    step: Step
    rid: str
    origin_input_ids: array[int]
    output_ids: array[int]
    kv: Any
    sampling_params: Any
    full_untruncated_fill_ids: array[int] = field(default_factory=lambda: array("q"))
    session_id: str | None = None
    session: Any = None
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    kv_rotation_base: int | None = None
    skip_radix_cache_insert: bool = False
    finished_len: int | None = None
    finished_reason: Any = None
    lock: Any = None
    last_node: Any = None
    prefix_len: int = 0
    extend_end: int = 0
    mamba_branching_seqlen: int | None = None
    is_finished: bool = False
    row_len: int = 0
    """Positions of the row that have a KV slot, a whole number of pages."""

    def finished(self) -> bool:
        """Whether the cache sees the final insert."""
        return self.is_finished

    def refresh_fill_ids(self) -> None:
        """Prompt and output as one sequence."""
        self.full_untruncated_fill_ids = self.origin_input_ids + self.output_ids

    def owned_kv_len(self) -> int:
        """KV positions the request has computed."""
        return self.kv.kv_committed_len

    def _compute_max_prefix_len(self, input_len: int) -> int:
        return input_len


class EngineLoop:
    """One engine with one cache; ``serve`` and ``finish`` are what its scheduler would do."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.budget = rig.budget
        self.max_running = rig.max_running
        self.cache = rig.cache
        self.grain = rig.budget.grain
        self.page = rig.cache.page_size
        self.allocator = rig.cache.token_to_kv_pool_allocator
        self.has_states = bool(rig.cache.supports_mamba())
        # Looked up once: the table's names are resolved at every access.
        self._match, self._checkpoint = compat.match_kv_cache, compat.checkpoint_kv_cache
        self._release, self._kv_info = compat.release_kv_cache, compat.ReqKvInfo
        self._alloc_row, self._alloc_kv = compat.alloc_req_slots, compat.alloc_token_slots

    def fits(self, step: Step) -> bool:
        """Whether the step's KV could be found without touching what running requests hold."""
        need = step.path_tokens // self.grain + 2 * self.page
        return self.allocator.available_size() + self.cache.full_evictable_size() >= need

    def serve(self, step: Step) -> tuple[ReplayRequest, Served]:
        """Prefill: match, copy-on-write, extend by chunks with a donation after each."""
        units = step.units(self.grain)
        prompt_len = step.prompt_tokens // self.grain
        hints = self.rig.hints(step) if self.rig.hints else None
        req = ReplayRequest(
            step=step,
            rid=str(step.index),
            origin_input_ids=units[:prompt_len],
            output_ids=units[prompt_len:],
            kv=self._kv_info(),
            sampling_params=SimpleNamespace(custom_params=hints),
            full_untruncated_fill_ids=units[:prompt_len],
        )
        # One token is always computed, for its logits.
        limit = max(step.prompt_tokens - 1, 0) // self.grain
        match = self._match(req, self.cache, req.origin_input_ids, cow_mamba=self.has_states, max_prefix_len=limit)
        if match.cache_protected_len is None:
            req.kv.cache_protected_len = req.prefix_len
        req.lock = self.cache.lock(req.last_node)
        hit, kv_hit = req.prefix_len, match.full_kv_hit_length if self.has_states else req.prefix_len
        ends = self.rig.chunks(hit, prompt_len, req, match)
        self._take_row(req)
        for end in ends:
            self._extend(req, end)
        self._reach(req, len(units))
        served = Served(step.prompt_tokens, hit * self.grain, kv_hit * self.grain, max(len(ends), 1))
        return req, served

    def finish(self, req: ReplayRequest) -> None:
        """Decode to the end of the answer and hand everything back."""
        total = len(req.origin_input_ids) + len(req.output_ids)
        req.kv.kv_committed_len = req.kv.kv_allocated_len = total
        if self.has_states and self.rig.extra_buffer:
            self._track_decode(req, total)
        req.is_finished = True
        self._release(req, self.cache, checkpoint=True)
        if self.rig.closed is not None and req.step.last_of_session:
            self.rig.closed(req.step)

    def _take_row(self, req: ReplayRequest) -> None:
        prefix = self.cache.prefix_device_indices(req) if req.prefix_len else None
        self._alloc_row(self.rig.req_to_token_pool, [req], self.cache)
        if prefix is not None:
            self._write(req, 0, prefix)
        req.row_len = req.prefix_len
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.prefix_len
        # Copying or clearing the private slot would run with the first forward pass.
        req.kv.mamba_cow_src_index = None
        req.kv.mamba_needs_clear = False

    def _extend(self, req: ReplayRequest, end: int) -> None:
        self._reach(req, end)
        req.extend_end = end
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        if self.has_states and self.rig.extra_buffer:
            self._track_extend(req)
        self._checkpoint(req, self.cache)

    def _reach(self, req: ReplayRequest, end: int) -> None:
        """KV slots for the row up to ``end``, in whole pages."""
        missing = -(-(end - req.row_len) // self.page) * self.page
        if missing <= 0:
            return
        self._write(req, req.row_len, self._alloc_kv(self.cache, missing))
        req.row_len += missing

    def _write(self, req: ReplayRequest, start: int, indices: Any) -> None:
        pool = self.rig.req_to_token_pool
        pool.write((req.kv.req_pool_idx, slice(start, start + len(indices))), indices.to(pool.req_to_token.dtype))

    def _track_extend(self, req: ReplayRequest) -> None:
        """Which one state of this extend is kept: a fork point inside it, else the last position on the grid."""
        grid, kv = self.rig.checkpoint_grid, req.kv
        extend_len = req.extend_end - req.prefix_len
        if extend_len < grid:
            return
        kept = req.prefix_len + extend_len // grid * grid
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_next_track_idx = self.rig.req_to_token_pool.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)
        fork = req.mamba_branching_seqlen
        if fork is not None and req.prefix_len < fork < req.extend_end and (fork - req.prefix_len) % grid == 0:
            kept = fork
        kv.mamba_last_track_seqlen = kept

    def _track_decode(self, req: ReplayRequest, total: int) -> None:
        """Snapshots at every multiple of the interval, into the two buffers in turn."""
        interval, kv = self.rig.track_interval, req.kv
        first = len(req.origin_input_ids) // interval + 1
        for position in range(first * interval, total + 1, interval):
            kv.mamba_prev_track_seqlen = kv.mamba_last_track_seqlen
            kv.mamba_last_track_seqlen = position
            kv.mamba_last_track_idx = kv.mamba_next_track_idx
            kv.mamba_next_track_idx = self.rig.req_to_token_pool.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)


def replay(
    rig: Rig, steps: Iterable[Step], *, serial: bool, on_step: Callable[[Step, Served], None] | None = None
) -> list[Served]:
    """Serve every step in order and return what each found.

    ``serial`` finishes a request before the next begins. Otherwise requests overlap as recorded; one that does not fit
    waits for the earliest running ones to end.

    Raises:
        BudgetError: a step's path is longer than the whole KV pool.
    """
    return run_loop(EngineLoop(rig), steps, serial=serial, on_step=on_step)


class Loop(Protocol[R]):
    """What runs requests against one cache."""

    budget: Budget

    @property
    def max_running(self) -> int:
        """Requests that may run at once."""
        ...

    def fits(self, step: Step) -> bool:
        """Whether the step's KV can be found without touching what running requests hold."""
        ...

    def serve(self, step: Step) -> tuple[R, Served]:
        """Prefill."""
        ...

    def finish(self, req: R) -> None:
        """The end of the answer."""
        ...


def run_loop(
    loop: Loop[R], steps: Iterable[Step], *, serial: bool, on_step: Callable[[Step, Served], None] | None = None
) -> list[Served]:
    """The load on one loop; see :func:`replay`.

    Raises:
        BudgetError: a step's path is longer than the whole KV pool.
    """
    running: list[tuple[float, int, Step, R]] = []
    results: list[Served] = []
    now = 0.0
    for step in steps:
        now = max(now, step.start)
        while running and (running[0][0] <= now or serial):
            loop.finish(heapq.heappop(running)[3])
        while running and _must_wait(loop, running, step):
            end, _, _, req = heapq.heappop(running)
            now = max(now, end)
            loop.finish(req)
        if not loop.fits(step):
            raise BudgetError(
                f"a request of {step.path_tokens} tokens does not fit into {loop.budget.kv_tokens} tokens of KV; "
                "give more with --kv-tokens"
            )
        req, served = loop.serve(step)
        heapq.heappush(running, (now + step.end - step.start, step.index, step, req))
        results.append(served)
        if on_step is not None:
            on_step(step, served)
    while running:
        loop.finish(heapq.heappop(running)[3])
    return results


def _must_wait(loop: Loop[R], running: list[tuple[float, int, Step, R]], step: Step) -> bool:
    if len(running) >= loop.max_running or not loop.fits(step):
        return True
    return any(other.session == step.session and other.stream == step.stream for _, _, other, _ in running)
