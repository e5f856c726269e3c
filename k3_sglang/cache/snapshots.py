"""States copied right behind the forward pass that made them, before a later pass can move them on.

With overlapped steps a request's own state is already one token, or one chunk, further when the scheduler looks at a
pass's result; and with pages of several tokens only states at whole pages can be named by a key. So the scheduler
reserves a slot when it launches a pass that ends where a checkpoint can be (:meth:`Snapshots.plan`), and the copy is
the last thing the pass does, on its stream (:meth:`Snapshots.copy`). A request holds at most one such slot, and none
while it decodes with pages of one token: at its end its own slot becomes the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Snapshot:
    """The copy of a request's state after ``length`` tokens."""

    slot: Any
    """Slot index of the state pool, int64 tensor of shape [1]."""
    length: int
    copied: bool = False
    """The pass has been launched with the copy behind it."""


class Snapshots:
    """The copies of one scheduler; ``states`` is its :class:`~k3_sglang.cache.component.CheckpointComponent`."""

    def __init__(self, states: Any) -> None:
        self._states = states
        self._planned: list[tuple[Any, Snapshot]] = []
        self.in_use = False
        """The engine calls :meth:`plan` before every pass; without it upstream copies when it keeps a checkpoint."""
        self.settle: Callable[[], None] = lambda: None
        """Lets work queued from now on wait for passes that are still running."""

    def plan(self, batch: Any) -> None:
        """Reserve slots for the requests whose state is to be kept after the coming pass."""
        self.in_use = True
        self._planned = []
        page_size = self._states.cache.page_size
        extend = batch.forward_mode.is_extend()
        if not extend and (page_size == 1 or not batch.forward_mode.is_decode()):
            return
        decoding = {id(req) for req in batch.decoding_reqs or ()} if extend else ()
        lengths = [req.extend_end for req in batch.reqs] if extend else batch.seq_lens_cpu.tolist()
        for req, length in zip(batch.reqs, lengths, strict=False):  # rows of a beam search follow the requests
            if length % page_size == 0 and id(req) not in decoding and self._may_be_kept(req):
                self._reserve(req, int(length))

    def _may_be_kept(self, req: Any) -> bool:
        return req.kv.holds_mamba and not req.skip_radix_cache_insert and req.beam_group is None

    def _reserve(self, req: Any, length: int) -> None:
        notes = self._states.notes(req)
        slot = notes.snapshot.slot if notes.snapshot is not None else self._states.free_slot()
        if slot is not None:
            notes.snapshot = Snapshot(slot, length)
            self._planned.append((req.kv.mamba_pool_idx.view(1), notes.snapshot))

    def copy(self) -> list[Any]:
        """Behind the pass: queue the copies. Returns tensors that must live until the pass is over."""
        planned, self._planned = self._planned, []
        if not planned:
            return []
        import torch

        rows = self._states.cache.req_to_token_pool
        sources = rows.translate_mamba_indices(torch.cat([own for own, _ in planned]))
        targets = rows.translate_mamba_indices(torch.cat([snapshot.slot for _, snapshot in planned]))
        rows.mamba_pool.copy_from(sources, targets)
        for _, snapshot in planned:
            snapshot.copied = True
        return [sources, targets]


def plan_pass(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``Scheduler.run_batch``."""
    snapshots = _snapshots_of(scheduler.tree_cache)
    if snapshots is not None:
        snapshots.plan(batch)
        if scheduler.enable_overlap:
            snapshots.settle = lambda: scheduler.schedule_stream.wait_stream(scheduler.forward_stream)


def copy_behind_pass(result: Any, worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> None:
    """After ``TpModelWorker.forward_batch_generation``, on the stream of the pass."""
    snapshots = _snapshots_of(batch.tree_cache) if batch is not None else None
    if snapshots is not None:
        keep = snapshots.copy()
        if keep:
            result.extra_keep_alive_refs = [*(result.extra_keep_alive_refs or ()), *keep]


def _snapshots_of(tree_cache: Any) -> Snapshots | None:
    from k3_sglang.cache.scheduling import states_of

    states = states_of(tree_cache)
    return states.snapshots if states is not None and states.exact else None
