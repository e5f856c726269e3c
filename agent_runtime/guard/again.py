"""Checks the histories of a ledger anew, as if they came in now: does each become the ids that it became then?"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import merge
from typing import Any, TypeAlias

from agent_runtime.errors import LedgerError
from agent_runtime.guard.history import Scope
from agent_runtime.guard.prompt import HistoryGuard
from agent_runtime.guard.repair import Mode
from agent_runtime.ledger.reading import LedgerReader, SessionSummary, StoredStep
from agent_runtime.ledger.records import TurnRecord
from agent_runtime.ledger.replay import Replayed, received, replayed_steps
from agent_runtime.ledger.turns import TurnIndex
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer

_MAX_TURNS = 1_000_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step made again. ``same`` is None for one with images, whose sizes are not on record, and for one that went to
    another server, which got no ids (`upstream.again` makes those)."""

    step: int
    session: int
    prompt_tokens: int
    verdict: str
    same: bool | None
    first_difference: int | None = None


Read: TypeAlias = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Makes a chat completion's body of one in another form, which comes first."""


def made_again(
    reader: LedgerReader,
    tokenizer: K3Tokenizer,
    mode: Mode = "repair",
    max_tokens: int = 16_000_000,
    read: Read | None = None,
) -> Iterator[Outcome]:
    """Every step of a ledger from its body alone, with the turns that had been generated before it.

    Raises LedgerError for a damaged step, and for one in another form when there is no ``read``.
    """
    guards: defaultdict[str, HistoryGuard] = defaultdict(lambda: HistoryGuard(TurnIndex(max_tokens, _MAX_TURNS), mode))
    cache = EncodeCache()
    sessions = {session.id: session for session in reader.sessions()}
    steps = ((replayed.step.id, replayed) for replayed in replayed_steps(reader))
    turns = ((record.turn.id, record) for record in reader.turns())
    for _, event in merge(steps, turns, key=lambda entry: entry[0]):
        if isinstance(event, TurnRecord):
            guards[event.turn.owner].index.add(event.turn)
        else:
            session = sessions[event.step.session]
            yield _outcome(event, session, reader, guards[session.owner], tokenizer, cache, read)


def _outcome(
    replayed: Replayed,
    session: SessionSummary,
    reader: LedgerReader,
    guard: HistoryGuard,
    tokenizer: K3Tokenizer,
    cache: EncodeCache,
    read: Read | None,
) -> Outcome:
    step = replayed.step
    then = str(step.facts["replay"]["verdict"])
    if step.facts.get("images") or "upstream" in step.facts:
        return Outcome(step.id, step.session, step.prompt_tokens, then, None)
    body = in_chat(step, received(replayed, reader.path), reader, read)
    scope = Scope(session.name, step.facts["is_conversation"], session.owner)
    built = guard.build(parse_request(body), scope, tokenizer, cache)
    ids = built.prompt.ids
    if ids == replayed.ids:
        return Outcome(step.id, step.session, step.prompt_tokens, then, built.replay.verdict == then)
    pairs = enumerate(zip(ids, replayed.ids, strict=False))
    first = next((at for at, (new, old) in pairs if new != old), min(len(ids), len(replayed.ids)))
    return Outcome(step.id, step.session, step.prompt_tokens, then, False, first)


def in_chat(step: StoredStep, body: dict[str, Any], reader: LedgerReader, read: Read | None) -> dict[str, Any]:
    """A step's body as a chat completion's. Raises LedgerError for one in another form when there is no ``read``."""
    form = step.facts.get("form")
    if form is None:
        return body
    if read is None:
        raise LedgerError(f"step {step.id} of ledger {reader.path} has a body in the form {form!r}: pass `read`")
    return read(form, body)
