"""Keeps what the gateway is asked and answers: in the guard's memory, and in the ledger if there is one."""

import asyncio
import hashlib
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_runtime.gateway.choice import Delivered
from agent_runtime.gateway.completion import Usage, WireForm
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.gateway.wire import usage_object
from agent_runtime.guard.prompt import HistoryGuard, ReplayedPrompt
from agent_runtime.guard.repair import Mode
from agent_runtime.ledger.following import Follower
from agent_runtime.ledger.records import StepRecord, TurnRecord
from agent_runtime.ledger.store import Ledger
from agent_runtime.ledger.turns import TurnIndex
from agent_runtime.ledger.writer import LedgerWriter
from agent_runtime.ledger.writers import numbers

logger = logging.getLogger(__name__)

_DAY_S = 86_400
_SESSION_BITS = 62
"""Numbers of named sessions are hashes above this bit, those of others are the numbers of their first steps."""


@dataclass(frozen=True, slots=True)
class StepNumber:
    """A request on record."""

    step: int
    session: int


class Record:
    """The record of one gateway process.

    Raises LedgerError when the settings name a ledger that cannot be used.
    """

    def __init__(
        self, settings: GatewaySettings, make_guard: Callable[[TurnIndex, Mode], HistoryGuard] = HistoryGuard
    ) -> None:
        self.index = TurnIndex(settings.recorded_tokens, settings.recorded_turns)
        self.guard = make_guard(self.index, settings.guard)
        self._path = settings.ledger
        self._writer: LedgerWriter | None = None
        self._follower: Follower | None = None
        last, writer = 0, 0
        if settings.ledger is not None:
            max_age_s = None if settings.ledger_max_age_days is None else settings.ledger_max_age_days * _DAY_S
            ledger = Ledger(
                settings.ledger,
                max_bytes=settings.ledger_max_bytes,
                max_age_s=max_age_s,
                shared=settings.ledger_shared,
            )
            ledger.keep_bounds(_now_ms())
            if ledger.writer:
                self._follower = Follower(settings.ledger, ledger.writer)  # before the turns are read: none is missed
            for keys in ledger.older_keys(settings.recorded_turns):
                self.index.mark_forgotten(keys)
            for turn in ledger.known_turns(settings.recorded_turns):
                self.index.add(turn)
            last, writer = ledger.last_number(), ledger.writer
            self._writer = LedgerWriter(ledger, self.index.forget_sessions)
        self._numbers = numbers(writer, last)

    @property
    def is_shared(self) -> bool:
        """Whether other gateways write to the same ledger."""
        return self._follower is not None

    def catch_up(self) -> None:
        """Know all turns whose ends other gateways of the same ledger have told their clients. May wait for a disk."""
        if self._follower is None:
            return
        try:
            self._follower.catch_up(self.index)
        except sqlite3.Error:
            logger.exception("ledger %s: turns of other gateways cannot be read; they count as not known", self._path)

    def step(
        self,
        replayed: ReplayedPrompt,
        body: bytes,
        form: WireForm,
        engine: Sequence[Mapping[str, Any]],
        upstream: Mapping[str, Any] | None = None,
    ) -> StepNumber:
        """Number a request, and store it. ``engine`` says for each choice what the engine is asked beside the ids;
        ``upstream`` what another server is asked beside the messages.
        """
        number = next(self._numbers)
        place = replayed.place
        if place.scope.name:
            session = _session_of(place.scope.name)
        else:
            session = place.parent.session if place.parent is not None else number
        if self._writer is not None:
            facts: dict[str, Any] = {"replay": replayed.replay.facts(), "engine": list(engine)}
            if form != "chat":
                facts["form"] = form
            facts["is_conversation"] = place.scope.is_conversation
            if upstream is not None:
                facts["upstream"] = upstream
            if replayed.images:
                facts["images"] = len(replayed.images)
            self._writer.submit(
                StepRecord(
                    id=number,
                    session=session,
                    name=place.scope.name,
                    parent=place.parent.id if place.parent is not None else None,
                    created_ms=_now_ms(),
                    body=body,
                    ids=replayed.prompt.ids,
                    prompt_tokens=replayed.prompt_tokens,
                    facts=facts,
                )
            )
        return StepNumber(number, session)

    async def turn(
        self,
        replayed: ReplayedPrompt,
        at: StepNumber,
        choice: int,
        delivered: Delivered,
        usage: Usage,
        signature: str,
    ) -> None:
        """Keep what was generated; returns when it would survive the end of this process.

        So no client ever sees the end of a turn that a restarted gateway does not know.
        """
        turn = self.guard.record(
            replayed,
            next(self._numbers),
            at.session,
            delivered.message,
            delivered.output_ids,
            whole=delivered.ids is not None,
            signature=signature,
        )
        if self._writer is None:
            return
        facts = {
            "finish": delivered.finish_reason,
            "usage": usage_object([usage]),
            "warnings": list(delivered.warnings),
            "signature": signature,
        }
        record = TurnRecord(turn, at.step, choice, _now_ms(), delivered.output_ids, facts)
        stored = asyncio.wrap_future(self._writer.submit(record))
        await asyncio.wait([stored])
        stored.exception()  # logged by the writer; the answer goes out all the same

    def ledger_bytes(self) -> int:
        """Bytes of the ledger's files, 0 without a ledger."""
        if self._path is None:
            return 0
        files = (self._path, Path(f"{self._path}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    @property
    def ledger_failing(self) -> bool:
        """Whether the ledger could not be written when that was last tried."""
        return self._writer is not None and self._writer.failing

    def close(self) -> None:
        """Write what waits."""
        if self._follower is not None:
            self._follower.close()
        if self._writer is not None:
            self._writer.close()


def _session_of(scope: str) -> int:
    digest = hashlib.blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> (64 - _SESSION_BITS)) | 1 << _SESSION_BITS


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
