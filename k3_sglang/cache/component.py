"""SGLang's state component with our eviction policy: keeps the checkpoint index in step with the radix tree.

The tree, its locks, host tiers and allocators are upstream's. This class decides which state is dropped, refuses to
fail when no slot is free, and tells the scheduler where a prefill should be cut.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from k3_sglang.cache.fanout import FanOut, Waiter
from k3_sglang.cache.hints import HintError, Hints
from k3_sglang.cache.metrics import Metrics
from k3_sglang.cache.misses import Misses
from k3_sglang.cache.naming import declare_named
from k3_sglang.cache.placement import PlacementSettings, Reason, Wanted, next_end
from k3_sglang.cache.policy import CheckpointIndex, EvictionSettings
from k3_sglang.cache.snapshots import Snapshot, Snapshots
from k3_sglang.cache.types import INFO, Limit, Role, Skip
from k3_sglang.compat import (
    CacheTransferPhase,
    ComponentType,
    EvictLayer,
    EvictParams,
    InternalStateBackup,
    LRURefreshPhase,
    MambaComponent,
    zero_match_result,
)

logger = logging.getLogger(__name__)


class NoSlot(Exception):
    """Every slot of the state pool is held by running requests."""


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


class CheckpointComponent(MambaComponent):
    """Upstream's component for recurrent state, with checkpoints chosen and dropped by value."""

    eviction = EvictionSettings()
    placement = PlacementSettings()

    def __init__(self, cache: Any, params: Any) -> None:
        self.exact = not params.enable_mamba_extra_buffer
        """States are those at the ends of chunks and turns; otherwise on SGLang's grid, in slots it reserves."""
        # Upstream keeps only states at the very end, so it wants pages of one token; our copies end on whole pages.
        super().__init__(cache, replace(params, page_size=1) if self.exact else params)
        self.index = CheckpointIndex(self.eviction)
        self.metrics = Metrics()
        self.misses = Misses()
        self.snapshots = Snapshots(self)
        self.cut_grid = params.page_size if self.exact else self.mamba_checkpoint_grid
        """States can be kept at multiples of this, on SGLang's grid counted from the start of a chunk."""
        self.place_by(self.placement)
        self._root: Any = None
        self._tried: set[int] = set()
        self._inserting: RequestNotes | None = None
        self._inserted_key: int | None = None
        self._matched: tuple[int, float, Role] | None = None

    def place_by(self, settings: PlacementSettings) -> None:
        """Place checkpoints by these constants, from now on."""
        self.placement = settings
        self.fan_out = FanOut(settings.pass_tokens, settings.most_wait_rounds, self.cut_grid)

    # --- requests -------------------------------------------------------------------------------------------------

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

    # --- matching -------------------------------------------------------------------------------------------------

    def refresh_lru(self, phase: Any, node: Any, root_node: Any) -> None:
        super().refresh_lru(phase, node, root_node)
        if phase is LRURefreshPhase.MATCH_END:
            index = self._index()
            checkpoint = index.get(node.id)
            self._matched = None
            if checkpoint is not None:
                role = checkpoint.role
                self._matched = (node.id, index.use(node.id), role)

    def finalize_match_result_in_tree_core(
        self, result: Any, params: Any, value_chunks: Any, best_value_len: int
    ) -> Any:
        result = super().finalize_match_result_in_tree_core(result, params, value_chunks, best_value_len)
        if not self.exact:
            return result  # upstream's own snapshot at a fork lies on its grid
        reusable = result.device_prefix_len + result.host_hit_length
        fork = result.full_kv_hit_length
        return result._replace(mamba_branching_seqlen=fork if fork > reusable else None)

    def finalize_match_result_in_cache(self, params: Any, result: Any) -> Any:
        req = params.req
        if req is None or not params.cow_mamba:
            return super().finalize_match_result_in_cache(params, result)
        notes = self.notes(req)
        has_state = self.tree_core.get_component_device_value(result.best_match_node, self.component_type) is not None
        if has_state and not req.kv.holds_mamba and not self._make_room(result.best_match_node):
            self.metrics.skipped[Skip.NO_SLOT_FOR_HIT] += 1
            self._note_match(notes, params, result, no_slot=True)
            return zero_match_result(self.cache, result, extra_key=params.key.extra_key)
        self._note_match(notes, params, result)
        return super().finalize_match_result_in_cache(params, result)

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
            self._index().use(checkpoint, notes.session)
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
        metrics.reused += found.checkpoint is not None and found.cached_tokens > 0
        metrics.prompt_tokens += prompt_len
        metrics.cached_tokens += found.cached_tokens
        metrics.no_state_tokens += found.with_kv_tokens - found.cached_tokens
        metrics.no_kv_tokens += prompt_len - found.with_kv_tokens
        metrics.hits_ended_by[found.limit] += 1
        req.customized_info = {**(getattr(req, "customized_info", None) or {}), INFO: [found.as_json()]}

    def _make_room(self, node_id: int) -> bool:
        """Whether a slot is free, after evicting one if need be; the matched checkpoint itself is kept."""
        slots = self.cache.req_to_token_pool.mamba_allocator
        if slots.available_size() == 0:
            lock = self.cache.inc_lock_ref(node_id)
            self.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
            self.cache.dec_lock_ref(node_id, lock.to_dec_params())
        return slots.available_size() > 0

    # --- keeping --------------------------------------------------------------------------------------------------

    def free_slot(self) -> Any:
        """A slot of the state pool, after evicting a checkpoint if need be; None, and counted, when there is none."""
        slots = self.cache.req_to_token_pool.mamba_allocator
        slot = slots.alloc(1)
        if slot is None:
            self.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
            slot = slots.alloc(1)
        if slot is None:
            self.metrics.skipped[Skip.NO_SLOT] += 1
        return slot

    def _alloc_mamba_slot(self, req: Any = None) -> Any:
        slot = self.free_slot()
        if slot is None:
            raise NoSlot
        return slot

    def prepare_for_caching_req(
        self, req: Any, insert_params: Any, token_ids_len: int, is_finished: bool
    ) -> int | None:
        notes = self.notes(req)
        if not notes.counted:
            self._count(req, notes)
        self._advance(req, notes, token_ids_len, is_finished)
        self._inserting, self._inserted_key = notes, None
        if self.exact and self.snapshots.in_use:
            return self._offer_exact(req, notes, insert_params, token_ids_len, is_finished)
        try:
            return super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)
        except NoSlot:
            return 0  # nothing is inserted; the request goes on

    def _offer_exact(self, req: Any, notes: RequestNotes, insert_params: Any, computed: int, is_finished: bool) -> int:
        """Give the tree the deepest state there is of the first ``computed`` tokens; returns its length."""
        snapshot = notes.snapshot
        length = 0
        at_key = computed == req.kv.kv_committed_len and computed % self.cache.page_size == 0
        notes.own_slot_offered = is_finished and at_key and not _ended_badly(req)
        if notes.own_slot_offered:
            # Also with a step ahead: the token it computed is the last one of the answer, and counted in.
            insert_params.mamba_value, length = req.kv.mamba_pool_idx.view(1).clone(), computed
        elif snapshot is not None and snapshot.copied and snapshot.length <= computed and not _ended_badly(req):
            insert_params.mamba_value, length = snapshot.slot, snapshot.length
            notes.snapshot = None
        if self.cache.cache_controller is not None:
            self.snapshots.settle()  # the host tier reads the state from outside the passes
        notes.kept_len = max(notes.kept_len, length)
        if is_finished:
            self.metrics.unkept_tokens += computed - notes.kept_len
        return length

    def _advance(self, req: Any, notes: RequestNotes, computed: int, is_finished: bool) -> None:
        """Others may wait for this request's next checkpoint, which is about to be made."""
        if notes.waiter is not None:
            notes.waiter.computed = computed
            if is_finished or computed >= len(notes.waiter.tokens):
                self.fan_out.leave(notes.waiter.number)
                notes.waiter = None

    def cleanup_after_caching_req(
        self, req: Any, is_finished: bool, insert_result: Any = None, insert_params: Any = None
    ) -> None:
        if self.exact and self.snapshots.in_use:
            self._settle_slots(req, is_finished, insert_result, insert_params)
        else:
            super().cleanup_after_caching_req(req, is_finished, insert_result, insert_params)
        self._inserting = None
        if not is_finished:
            return
        notes, index, key = self.notes(req), self._index(), self._inserted_key
        if insert_params is not None and req.kv.cache_protected_len < req.kv.kv_committed_len:
            begin = req.kv.cache_protected_len
            self.misses.text_gone(req.last_node, req.full_untruncated_fill_ids[begin:], Limit.BOUNDARY)
        if key is not None and key in index and notes.hints.wait_s is not None:
            index.expect(key, notes.hints.wait_s)
        if notes.hints.release and notes.session is not None:
            self.metrics.released += index.release(notes.session)

    def _settle_slots(self, req: Any, is_finished: bool, insert_result: Any, insert_params: Any) -> None:
        """Free what was offered and not taken, and all that a finished request still holds."""
        rows, notes = self.cache.req_to_token_pool, self.notes(req)
        offered = insert_params.mamba_value if insert_params is not None else None
        taken = insert_result is not None and not insert_result.mamba_exist
        if offered is not None and not taken and not notes.own_slot_offered:
            rows.mamba_allocator.free(offered)
        if not is_finished:
            return
        if not (notes.own_slot_offered and taken):
            rows.free_mamba_cache(req)
        notes.own_slot_offered = False
        if notes.snapshot is not None:
            rows.mamba_allocator.free(notes.snapshot.slot)
            notes.snapshot = None

    def commit_insert_component_data(
        self, node: Any, is_new_leaf: bool, params: Any, result: Any, cache_actions: Any
    ) -> None:
        super().commit_insert_component_data(node, is_new_leaf, params, result, cache_actions)
        index, notes = self._index(), self._inserting
        session = notes.session if notes is not None else None
        if node.id in index:
            index.use(node.id, session)
        else:
            self._add(node, session)
            self.metrics.made += 1
            self.misses.state_made(node.id)
        self._inserted_key = node.id
        if notes is not None:
            declare_named(index, node.id, notes.hints.named, self.cut_grid)

    def commit_hicache_transfer(self, node: Any, phase: Any, transfers: Any = (), **further: Any) -> None:
        super().commit_hicache_transfer(node, phase, transfers, **further)
        if phase == CacheTransferPhase.LOAD_BACK and self._holds_state(node) and node.id not in self._index():
            self._add(node, None)

    # --- dropping -------------------------------------------------------------------------------------------------

    def evict_component(
        self, node: Any, device_frees: Any, host_frees: Any, cache_actions: Any, target: Any = EvictLayer.DEVICE
    ) -> tuple[int, int]:
        freed = super().evict_component(node, device_frees, host_frees, cache_actions, target)
        if not self._holds_state(node) and node.id in self.index:
            self.index.remove(node.id)
            self.misses.state_dropped(node.id)
            if not self.is_evict_device_ongoing:
                self.metrics.dropped_with_kv += 1
        return freed

    def discard_deleted_session_leaf(self, node: Any) -> None:
        super().discard_deleted_session_leaf(node)
        self.misses.text_gone(node.parent.id, node.key.token_ids, Limit.EVICTED)
        self.misses.node_removed(node.id)

    def _evict_device_start(self, request_cnt: int) -> None:
        self._evict_device_request_cnt = request_cnt
        self._evict_device_cursor = None
        self._tried = set()
        if len(self._index()) != len(self.tree_core.lru_lists[self.component_type].cache):
            self.metrics.resynchronised += 1
            logger.error("the checkpoint index lost step with the tree and was rebuilt; please report this")
            self._resynchronise()

    def _evict_device_next_node(self, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: Any) -> Any:
        core, kind = self.tree_core, self.component_type
        if tracker[kind] >= self._evict_device_request_cnt:
            return None
        victim = self.index.victim(spared=self._tried)
        if victim is None:
            return None
        self._tried.add(victim.key)
        self.metrics.evicted[victim.role] += 1
        node = core.node_by_id(victim.key)
        if node in core.evictable_device_leaves:
            return node.id
        data = node.component_data[kind]
        kv_on_device = node.component_data[ComponentType.FULL].value is not None
        write_back = core.enable_hicache and core.is_write_back
        if write_back and data.host_value is None and not node.backuped and kv_on_device:
            return InternalStateBackup(node_id=node.id, num_tokens=1)
        frees = {"device_frees": device_frees, "host_frees": host_frees, "cache_actions": cache_actions}
        core._evict_component_and_detach_lru(node, self, target=EvictLayer.DEVICE, tracker=tracker, **frees)
        core._cascade_evict(node, self, tracker, **frees)
        return None

    def _evict_device_end(self) -> None:
        self._evict_device_cursor = None
        self._tried = set()

    def acquire_component_lock(self, node: Any, result: Any, lock_host: bool = False) -> Any:
        result = super().acquire_component_lock(node, result, lock_host)
        self._copy_lock(node)
        return result

    def release_component_lock(self, node: Any, params: Any, lock_host: bool = False) -> None:
        super().release_component_lock(node, params, lock_host)
        self._copy_lock(node)

    # --- index ----------------------------------------------------------------------------------------------------

    def _index(self) -> CheckpointIndex:
        """The index of the present tree; a flush makes a new root."""
        if self.tree_core.root_node is not self._root:
            self._root = self.tree_core.root_node
            self.index.clear()
            self.misses.clear()
        return self.index

    def _holds_state(self, node: Any) -> bool:
        return node.component_data[self.component_type].value is not None

    def _copy_lock(self, node: Any) -> None:
        if node.id in self._index():
            self.index.set_locked(node.id, node.component_data[self.component_type].lock_ref > 0)

    def _add(self, node: Any, session: str | None) -> None:
        above, depth = node.parent, len(node.key)
        while above is not self._root and above.id not in self.index:
            depth += len(above.key)
            above = above.parent
        parent = None if above is self._root else above.id
        if parent is not None:
            depth += self.index.get(parent).depth  # type: ignore[union-attr]
        self.index.add(node.id, depth, parent, self._next_below(node), session=session)
        self._copy_lock(node)

    def _next_below(self, node: Any) -> Iterator[int]:
        """Checkpoints below a node that have none in between."""
        waiting = deque(node.children.values())
        while waiting:
            below = waiting.popleft()
            if below.id in self.index:
                yield below.id
            else:
                waiting.extend(below.children.values())

    def _resynchronise(self) -> None:
        self.index.clear()
        waiting = deque(self.tree_core.root_node.children.values())
        while waiting:
            node = waiting.popleft()
            if self._holds_state(node):
                self._add(node, None)
            waiting.extend(node.children.values())


def _ended_badly(req: Any) -> bool:
    """Whether the engine put a stop token in place of a token that cannot be: the state has seen the other one."""
    return getattr(req.finished_reason, "matched", None) == "NaN happened"
