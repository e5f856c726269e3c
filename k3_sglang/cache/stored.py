"""Checkpoints in a pool of their own, stored in fewer bytes (:mod:`k3_sglang.cache.formats`)."""

from __future__ import annotations

import logging
from typing import Any

from k3_sglang import compat
from k3_sglang.cache.component import CheckpointComponent, NoSlot
from k3_sglang.cache.formats import CheckpointPool, StoredSettings, refuse
from k3_sglang.cache.types import Skip
from k3_sglang.compat import EvictParams

logger = logging.getLogger(__name__)


def install(context: Any, settings: StoredSettings) -> CheckpointPool:
    """Give the request pool a pool of checkpoints; SGLang's forward pass restores from it what was matched.

    Raises:
        ValueError: a flag of SGLang contradicts it.
    """
    refuse(context)
    rows = context.params.req_to_token_pool
    allocator = compat.MambaSlotAllocator(size=settings.slots, device=rows.device)
    rows.mamba_ckpt_pool = CheckpointPool(settings.form, settings.slots, rows.mamba_pool, allocator)
    return rows.mamba_ckpt_pool


class StoredCheckpointComponent(CheckpointComponent):
    """The state component when no checkpoint holds a slot of the running states."""

    @property
    def _store(self) -> CheckpointPool:
        return self.cache.req_to_token_pool.mamba_ckpt_pool

    def free_slot(self) -> Any:
        """A slot for a running state; dropping checkpoints would free none."""
        slot = self.cache.req_to_token_pool.mamba_allocator.alloc(1)
        if slot is None:
            self.metrics.skipped[Skip.NO_SLOT] += 1
        return slot

    def _make_room(self, node_id: int) -> bool:
        return self.cache.req_to_token_pool.mamba_allocator.available_size() > 0

    def _store_slot(self) -> Any:
        slot = self._store.alloc(1)
        if slot is None:
            self.cache.evict(EvictParams(num_tokens=0, mamba_num=1))
            slot = self._store.alloc(1)
        if slot is None:
            self.metrics.skipped[Skip.NO_SLOT] += 1
        return slot

    def _alloc_int8_ckpt_slot(self) -> Any:
        """Upstream's name for a slot of the second pool, whatever the format."""
        slot = self._store_slot()
        if slot is None:
            raise NoSlot
        return slot

    def prepare_for_caching_req(
        self, req: Any, insert_params: Any, token_ids_len: int, is_finished: bool
    ) -> int | None:
        length = super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)
        if self.exact and self.snapshots.in_use and insert_params.mamba_value is not None:
            return length if self._move_to_store(req, insert_params) else 0
        return length

    def _move_to_store(self, req: Any, insert_params: Any) -> bool:
        """Offer a stored copy in place of a running slot. False when there is none, and nothing is offered."""
        rows, notes = self.cache.req_to_token_pool, self.notes(req)
        running, kept = insert_params.mamba_value, self._store_slot()
        if kept is not None:
            self.snapshots.settle()  # the state may still be written by a pass on another stream
            try:
                self._store.store_from_active(rows.mamba_pool, running.view(-1), kept)
            except ValueError as error:
                logger.warning("checkpoint not kept: %s", error)
                self._store.free(kept)
                kept = None
        if not notes.own_slot_offered:
            rows.mamba_allocator.free(running)
        notes.own_slot_offered = False
        insert_params.mamba_value = kept
        return kept is not None

    def _settle_slots(self, req: Any, is_finished: bool, insert_result: Any, insert_params: Any) -> None:
        if insert_params is not None and insert_params.mamba_value is not None:
            if insert_result is None or insert_result.mamba_exist:
                self._store.free(insert_params.mamba_value)
            insert_params.mamba_value = None  # ours is settled; what follows is about running slots
        super()._settle_slots(req, is_finished, insert_result, insert_params)
