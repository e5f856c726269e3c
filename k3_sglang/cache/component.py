"""SGLang's state component with checkpoints placed, kept and dropped by value.

Upstream's tree calls it when a prompt is matched, when a request's progress is kept, and when memory is short. It
refuses to fail when no slot is free.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from k3_sglang.cache.naming import declare_named
from k3_sglang.cache.request_notes import RequestNotes, RequestsComponent
from k3_sglang.cache.snapshots import Snapshots
from k3_sglang.cache.types import Limit, Skip
from k3_sglang.compat import EvictParams, LRURefreshPhase, mamba_checkpoint_grid, zero_match_result


class NoSlot(Exception):
    """Every slot of the state pool is held by running requests."""


class CheckpointComponent(RequestsComponent):
    """Upstream's component for recurrent state, with checkpoints chosen and dropped by value."""

    def __init__(self, cache: Any, params: Any) -> None:
        exact = not params.enable_mamba_extra_buffer
        # Upstream keeps only states at the very end, so it wants pages of one token; our copies end on whole pages.
        given = replace(params, page_size=1) if exact else params
        super().__init__(cache, given, params.page_size if exact else mamba_checkpoint_grid(params.page_size), exact)
        self.snapshots = Snapshots(self)
        self._inserting: RequestNotes | None = None
        self._inserted_key: int | None = None

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
        moves = notes is None or notes.hints.is_conversation
        if node.id in index:
            index.use(node.id, session, moves=moves)
        else:
            self._add(node, session, moves=moves)
            self.metrics.made += 1
            self.misses.state_made(node.id)
        self._inserted_key = node.id
        if notes is not None:
            declare_named(index, node.id, notes.hints.named, self.cut_grid)


def _ended_badly(req: Any) -> bool:
    """Whether the engine put a stop token in place of a token that cannot be: the state has seen the other one."""
    return getattr(req.finished_reason, "matched", None) == "NaN happened"
