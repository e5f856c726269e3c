"""Writes to the ledger on a thread of its own, so that no request waits for a disk before its first token."""

import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future

from agent_runtime.errors import LedgerError
from agent_runtime.ledger.records import StepRecord, TurnRecord
from agent_runtime.ledger.store import Ledger

logger = logging.getLogger(__name__)

_BATCH = 256
_BOUNDS_EVERY = 64
"""Commits between two looks at size and age."""

_Entry = tuple[StepRecord | TurnRecord, "Future[None]"]


class LedgerWriter:
    """Appends records in the order they are handed over; what waits at the same time goes into one transaction.

    ``forgotten`` is called, on the writer's thread, with sessions that the bounds have removed. When the disk fails,
    the fault is logged once and the waiting futures have it; requests go on without being recorded.
    """

    def __init__(self, ledger: Ledger, forgotten: Callable[[Collection[int]], None]) -> None:
        self._ledger = ledger
        self._forgotten = forgotten
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._commits = 0
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def submit(self, record: StepRecord | TurnRecord) -> "Future[None]":
        """Hand a record over. The future is done when it will survive the end of this process."""
        future: Future[None] = Future()
        self._queue.put((record, future))
        return future

    @property
    def failing(self) -> bool:
        """Whether the last records could not be written."""
        return self._failed

    def close(self) -> None:
        """Write what waits, then close the ledger."""
        self._queue.put(None)
        self._thread.join()
        self._ledger.close()

    def _run(self) -> None:
        while True:
            entry = self._queue.get()
            if entry is None:
                return
            batch = [entry]
            closing = False
            while len(batch) < _BATCH and not self._queue.empty():
                entry = self._queue.get()
                if entry is None:
                    closing = True
                    break
                batch.append(entry)
            self._write(batch)
            if closing:
                return

    def _write(self, batch: list[_Entry]) -> None:
        try:
            self._ledger.append([record for record, _ in batch])
        except (sqlite3.Error, LedgerError, OSError, ValueError) as error:
            if not self._failed:
                self._failed = True
                logger.exception("ledger %s cannot be written; requests go on without it", self._ledger.path)
            for _, future in batch:
                future.set_exception(error)
            return
        self._failed = False
        for _, future in batch:
            future.set_result(None)
        self._commits += 1
        if self._commits % _BOUNDS_EVERY == 1:
            self._keep_bounds()

    def _keep_bounds(self) -> None:
        try:
            gone = self._ledger.keep_bounds(time.time_ns() // 1_000_000)
        except sqlite3.Error:
            logger.exception("ledger %s: old sessions could not be removed", self._ledger.path)
            return
        if gone:
            self._forgotten(gone)
