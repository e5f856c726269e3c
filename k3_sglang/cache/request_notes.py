"""What the cache remembers of each request: its hints, what it found, where its prefill should be cut."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from k3_sglang.cache.fanout import FanOut, Waiter
from k3_sglang.cache.hints import HintError, Hints
from k3_sglang.cache.indexed import IndexedComponent
from k3_sglang.cache.placement import PlacementSettings, Reason, Wanted, next_end
from k3_sglang.cache.snapshots import Snapshot
from k3_sglang.cache.types import INFO, Limit, Role, Skip

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """What a match gave."""

    prompt_tokens: int
    cached_tokens: int
    with_kv_tokens: int
    """Tokens whose KV was there, with or without a state to go on from."""
    limit: Limit
    checkpoint: int | None
    """Key of the checkpoint to go on from."""
    tip_age: float | None
    """Age of that checkpoint in requests when it was a tip."""

    def as_json(self) -> dict[str, Any]:
        """What a client is told."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "why_not_more": self.limit.value,
            "no_state_tokens": self.with_kv_tokens - self.cached_tokens,
            "no_kv_tokens": self.prompt_tokens - self.with_kv_tokens,
        }


@dataclass
class RequestNotes:
    """What the cache remembers of one request, on the request itself."""

    hints: Hints
    session: str | None
    counted: bool = False
    """The request has been counted as one tick."""
    found: Found | None = None
    """The last match; the one before its prompt is computed counts."""
    fork: int = 0
    """Where its path leaves KV that others computed, in tokens; 0 when nowhere beyond its checkpoint."""
    waiter: Waiter | None = None
    """Its place among requests with a common beginning, until its prompt is computed."""
    snapshot: Snapshot | None = None
    """A copy of its state that is not in the tree yet."""
    kept_len: int = 0
    """Deepest state known to be in the tree on its path."""
    own_slot_offered: bool = False
    """At its end its own slot, not a copy, was offered to the tree."""


class RequestsComponent(IndexedComponent):
    """The part of the component that looks at requests."""

    placement = PlacementSettings()

    def __init__(self, cache: Any, params: Any, cut_grid: int, exact: bool) -> None:
        super().__init__(cache, params)
        self.exact = exact
        """States are those at the ends of chunks and turns; otherwise on SGLang's grid, in slots it reserves."""
        self.cut_grid = cut_grid
        """States can be kept at multiples of this, on SGLang's grid counted from the start of a chunk."""
        self._matched: tuple[int, float, Role] | None = None
        self.place_by(self.placement)

    def place_by(self, settings: PlacementSettings) -> None:
        """Place checkpoints by these constants, from now on."""
        self.placement = settings
        self.fan_out = FanOut(settings.pass_tokens, settings.most_wait_rounds, self.cut_grid)

    def notes(self, req: Any) -> RequestNotes:
        """The request's notes, made from its hints on first use; unreadable hints are counted and left out."""
        notes = getattr(req, "k3_cache", None)
        if notes is None:
            hints = Hints()
            try:
                hints = Hints.from_custom_params(getattr(req.sampling_params, "custom_params", None))
            except HintError as error:
                if not self.metrics.skipped[Skip.BAD_HINT]:
                    logger.warning("cache hint ignored (further ones are only counted): %s", error)
                self.metrics.skipped[Skip.BAD_HINT] += 1
            notes = RequestNotes(hints, hints.session or getattr(req, "session_id", None))
            req.k3_cache = notes
        return notes

    def chunk_end(self, req: Any, start: int, limit: int) -> int:
        """Where the chunk of a request that starts at ``start`` should end, at most ``limit``."""
        notes = self.notes(req)
        wanted = notes.hints.wanted(start, limit)
        if start < notes.fork < limit:
            wanted.append(Wanted(notes.fork, Reason.FORK))
        if notes.waiter is not None:
            wanted += [Wanted(p, Reason.FAN_OUT) for p in sorted(notes.waiter.cuts) if start < p < limit]
        if self.exact and limit % self.cut_grid:
            wanted.append(Wanted(limit, Reason.PROMPT_END))
        if not wanted:
            return limit
        origin = 0 if self.exact else start
        end, refused = next_end(start, limit, wanted, self.placement, self.cut_grid, origin)
        self.metrics.skipped[Skip.CUT_TOO_DEAR] += refused
        return end

    def count_cut(self, req: Any, end: int) -> None:
        """A chunk really ends at a wanted position."""
        notes = self.notes(req)
        awaited = notes.waiter.cuts if notes.waiter is not None else ()
        positions = [(Reason.FAN_OUT, awaited), (Reason.FORK, (notes.fork,)), (Reason.HEAD, (notes.hints.head_len,))]
        for reason, wanted in positions:
            if any(0 <= position - end < self.cut_grid for position in wanted):
                self.metrics.cuts[reason] += 1
                return
        named = any(0 <= position - end < self.cut_grid for position in notes.hints.named)
        self.metrics.cuts[Reason.BOUNDARY if named else Reason.PROMPT_END] += 1

    def _note_match(self, notes: RequestNotes, params: Any, result: Any, no_slot: bool = False) -> None:
        """Remember what was found, why it was not more, and how long the session was away."""
        reach = result.device_prefix_len + result.host_hit_length
        prompt_len, with_kv = len(params.req.origin_input_ids), max(reach, result.full_kv_hit_length)
        node = self.tree_core.node_by_id(result.best_match_node)
        limit = self.misses.limit(node, params.key, reach, with_kv, self.cache.page_size)
        if limit is Limit.WHOLE and reach < prompt_len - 1:
            limit = Limit.ASKED
        cached, limit = (0, Limit.NO_SLOT) if no_slot else (reach, limit)
        checkpoint, age = None, None
        if self._matched is not None and self._matched[0] == result.best_match_node:
            checkpoint, matched_age, role = self._matched
            self._index().use(checkpoint, notes.session, moves=notes.hints.is_conversation)
            age = matched_age if role is Role.TIP else None
        notes.fork, notes.kept_len = result.mamba_branching_seqlen or 0, cached
        notes.found = Found(prompt_len, cached, max(cached, with_kv), limit, checkpoint, age)

    def _count(self, req: Any, notes: RequestNotes) -> None:
        """The first part of a request's prompt has been computed: it counts as a request, with what it reused."""
        notes.counted = True
        index, metrics = self._index(), self.metrics
        index.begin_request(notes.hints.now_s)
        prompt_len = len(req.origin_input_ids)
        found = notes.found or Found(prompt_len, 0, 0, Limit.ASKED, None, None)
        if found.tip_age is not None:
            index.observe_reuse(found.tip_age)
        if found.checkpoint is not None and found.cached_tokens > 0:
            metrics.reused += 1
            reused = index.get(found.checkpoint)
            if reused is not None:  # a later match of the same request may have let it go
                reused.count_hit()
        metrics.prompt_tokens += prompt_len
        metrics.cached_tokens += found.cached_tokens
        metrics.no_state_tokens += found.with_kv_tokens - found.cached_tokens
        metrics.no_kv_tokens += prompt_len - found.with_kv_tokens
        metrics.hits_ended_by[found.limit] += 1
        req.customized_info = {**(getattr(req, "customized_info", None) or {}), INFO: [found.as_json()]}

    def _advance(self, req: Any, notes: RequestNotes, computed: int, is_finished: bool) -> None:
        """Others may wait for this request's next checkpoint, which is about to be made."""
        if notes.waiter is not None:
            notes.waiter.computed = computed
            if is_finished or computed >= len(notes.waiter.tokens):
                self.fan_out.leave(notes.waiter.number)
                notes.waiter = None
