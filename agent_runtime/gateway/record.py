"""Keeps what the gateway is asked and answers: in the guard's memory, and in the ledger if there is one."""

import asyncio
import hashlib
import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent_runtime.gateway.choice import Delivered
from agent_runtime.gateway.completion import Usage, WireForm
from agent_runtime.gateway.owner import NO_OWNER
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.gateway.wire import usage_object
from agent_runtime.guard.fingerprint import Fingerprints
from agent_runtime.guard.history import Scope
from agent_runtime.guard.prompt import HistoryGuard, ReplayedPrompt
from agent_runtime.guard.repair import Mode
from agent_runtime.guard.stability import Tips
from agent_runtime.inspector.facts import TurnFacts
from agent_runtime.inspector.log import StepLog
from agent_runtime.inspector.reading import new_step, stored_step, turn_facts
from agent_runtime.inspector.structure import call_tokens
from agent_runtime.ledger.following import Follower
from agent_runtime.ledger.records import StepRecord, TurnRecord
from agent_runtime.ledger.store import Ledger
from agent_runtime.ledger.turns import TurnIndex
from agent_runtime.ledger.writer import LedgerWriter
from agent_runtime.ledger.writers import numbers
from k3_sglang.chat.tokenizer import K3Tokenizer

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
    """The record of one gateway process: the turns of each owner of a key in an index of their own.

    So nothing that one owner sends can lead to another's turn, and none can make another's turns go. The bounds of
    the settings are shared out evenly. Turns of owners who have no key any more stay in the ledger, unknown here.
    Raises LedgerError when the settings name a ledger that cannot be used.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        make_guard: Callable[[TurnIndex, Mode], HistoryGuard] = HistoryGuard,
        owners: Collection[str] = (NO_OWNER,),
        tokenizer: K3Tokenizer | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        is_one = NO_OWNER in owners  # with keys, nobody may see the sessions of all
        self.log = StepLog(settings.inspector_steps) if settings.inspects and is_one else None
        """The latest steps for the inspector; None when there is none."""
        tokens, turns = (max(1, bound // len(owners)) for bound in (settings.recorded_tokens, settings.recorded_turns))
        # What these remember is found by content and by number of turn, so it is no way from one owner to another.
        prints, tips = Fingerprints(), Tips()
        self._guards = {
            owner: replace(make_guard(TurnIndex(tokens, turns), settings.guard), prints=prints, tips=tips)
            for owner in owners
        }
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
            for owner, guard in self._guards.items():
                for keys in ledger.older_keys(turns, owner):
                    guard.index.mark_forgotten(keys)
                for turn in ledger.known_turns(turns, owner):
                    guard.index.add(turn)
            if self.log is not None:
                for outline in ledger.latest_steps(settings.inspector_steps):
                    self.log.add(stored_step(outline))
            last, writer = ledger.last_number(), ledger.writer
            self._writer = LedgerWriter(ledger, self._forget_sessions)
        self._numbers = numbers(writer, last)

    @property
    def is_shared(self) -> bool:
        """Whether other gateways write to the same ledger."""
        return self._follower is not None

    @property
    def guards(self) -> Collection[HistoryGuard]:
        """Those of all owners."""
        return self._guards.values()

    def catch_up(self) -> None:
        """Know all turns whose ends other gateways of the same ledger have told their clients. May wait for a disk."""
        if self._follower is None:
            return
        try:
            forget = self.log.forget_sessions if self.log is not None else None
            self._follower.catch_up({owner: guard.index for owner, guard in self._guards.items()}, forget)
        except sqlite3.Error:
            logger.exception("ledger %s: turns of other gateways cannot be read; they count as not known", self._path)

    def guard(self, owner: str) -> HistoryGuard:
        """The guard of an owner's histories, with the index of that owner's turns."""
        return self._guards[owner]

    def _forget_sessions(self, sessions: Collection[int]) -> None:
        for guard in self._guards.values():
            guard.index.forget_sessions(sessions)
        if self.log is not None:
            self.log.forget_sessions(sessions)

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
            session = _session_of(place.scope)
        else:
            session = place.parent.session if place.parent is not None else number
        if self.log is None and self._writer is None:
            return StepNumber(number, session)
        now_ms = _now_ms()
        step = new_step(number, session, replayed, form, now_ms)
        if self.log is not None:
            self.log.add(step)
        if self._writer is not None:
            facts: dict[str, Any] = {"replay": step.replay, "engine": list(engine)}
            if form != "chat":
                facts["form"] = form
            facts["is_conversation"] = place.scope.is_conversation
            if upstream is not None:
                facts["upstream"] = upstream
            if replayed.images:
                facts["images"] = len(replayed.images)
            if step.came_back is not None:
                facts["came_back"] = step.came_back
            if step.abandoned_from is not None:
                facts["abandoned_from"] = step.abandoned_from
            self._writer.submit(
                StepRecord(
                    id=number,
                    session=session,
                    name=place.scope.name,
                    parent=place.parent.id if place.parent is not None else None,
                    created_ms=now_ms,
                    body=body,
                    ids=replayed.prompt.ids,
                    prompt_tokens=replayed.prompt_tokens,
                    facts=facts,
                    owner=place.scope.owner,
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
        turn = self.guard(replayed.place.scope.owner).record(
            replayed,
            next(self._numbers),
            at.session,
            delivered.message,
            delivered.output_ids,
            whole=delivered.ids is not None,
            signature=signature,
        )
        if self.log is None and self._writer is None:
            return
        now_ms = _now_ms()
        known = self._facts_of(turn.id, choice, now_ms, delivered, usage)
        if self.log is not None:
            self.log.turn(at.step, known)
        if self._writer is None:
            return
        facts: dict[str, Any] = {
            "finish": delivered.finish_reason,
            "usage": usage_object([usage]),
            "warnings": list(delivered.warnings),
            "signature": signature,
            "call_tokens": known.call_tokens,
        }
        if known.limit is not None:
            facts["why_not_more"] = known.limit
        step = None if self.log is None else self.log.step(at.step)
        if step is not None and step.began_ms is not None:
            facts["began_ms"] = step.began_ms
        record = TurnRecord(turn, at.step, choice, now_ms, delivered.output_ids, facts)
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

    def abandoned(self, scope: Scope, start: int) -> None:
        """The client of a named session will not go on behind token ``start``."""
        if self.log is not None:
            self.log.abandoned(_session_of(scope), start)

    def began(self, at: StepNumber, cached_tokens: int) -> None:
        """The first token of a step has come."""
        if self.log is not None:
            self.log.began(at.step, _now_ms(), cached_tokens)

    def ended(self, at: StepNumber) -> None:
        """Nothing more comes of a step, whatever became of it."""
        if self.log is not None:
            self.log.ended(at.step, _now_ms())

    def close(self) -> None:
        """Write what waits."""
        if self._follower is not None:
            self._follower.close()
        if self._writer is not None:
            self._writer.close()

    def _facts_of(self, number: int, choice: int, now_ms: int, delivered: Delivered, usage: Usage) -> TurnFacts:
        has_calls = bool(delivered.message.tool_calls or delivered.incomplete_calls)
        return turn_facts(
            number,
            choice,
            now_ms,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            think_tokens=usage.reasoning_tokens,
            call_tokens=call_tokens(delivered.output_ids, self._tokenizer) if self._tokenizer and has_calls else 0,
            finish=delivered.finish_reason,
            warnings=delivered.warnings,
            limit=usage.cache.get("why_not_more"),
        )


def _session_of(scope: Scope) -> int:
    name = f"{scope.owner}\0{scope.name}" if scope.owner else scope.name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> (64 - _SESSION_BITS)) | 1 << _SESSION_BITS


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
