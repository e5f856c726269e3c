"""Writes the requests of a ledger to another server anew, from what was received: the same bytes as then?"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from typing import Any

from agent_runtime.errors import LedgerError
from agent_runtime.guard.again import Read, in_chat
from agent_runtime.guard.history import Scope
from agent_runtime.guard.repair import Mode
from agent_runtime.ledger.reading import LedgerReader, SessionSummary, StoredStep
from agent_runtime.ledger.records import TurnRecord
from agent_runtime.ledger.replay import received_object
from agent_runtime.ledger.turns import TurnIndex
from agent_runtime.upstream.guard import MessageGuard, MessagePrompt, passed_through
from agent_runtime.upstream.profiles import PROFILES
from agent_runtime.upstream.wire import json_bytes
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.types import JSONObject

_MAX_TURNS = 1_000_000
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class SentAgain:
    """A step: the bodies its choices were asked with, and whether they are those that were sent."""

    step: int
    session: int
    bodies: tuple[bytes, ...]
    same: bool


def request_body(model: str, prompt: MessagePrompt, fields: Mapping[str, Any]) -> JSONObject:
    """The body of one request; ``fields`` are those that neither shape the prompt nor the stream."""
    return {
        "model": model,
        **prompt.head,
        "messages": list(prompt.messages),
        **prompt.tail,
        **fields,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def body_digest(body: bytes) -> str:
    """By which a body is known again."""
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest()


def sent_again(
    reader: LedgerReader, mode: Mode = "repair", max_tokens: int = 16_000_000, read: Read | None = None
) -> Iterator[SentAgain]:
    """Every step of a ledger that went to another server, with the turns that had come before it.

    Raises LedgerError for a damaged step, for one of a profile that is not known here, and for one in another form
    than chat completions when there is no ``read``.
    """
    indexes: defaultdict[str, TurnIndex] = defaultdict(lambda: TurnIndex(max_tokens, _MAX_TURNS))
    sessions = {session.id: session for session in reader.sessions()}
    steps = ((step.id, step) for step in reader.steps() if "upstream" in step.facts)
    turns = ((record.turn.id, record) for record in reader.turns())
    for _, event in merge(steps, turns, key=lambda entry: entry[0]):
        if isinstance(event, TurnRecord):
            indexes[event.turn.owner].add(event.turn)
        else:
            session = sessions[event.session]
            yield _made(event, session, reader, indexes[session.owner], mode, read)


def _made(
    step: StoredStep, session: SessionSummary, reader: LedgerReader, index: TurnIndex, mode: Mode, read: Read | None
) -> SentAgain:
    facts = step.facts["upstream"]
    profile = PROFILES.get(facts["profile"])
    if profile is None:
        raise LedgerError(f"step {step.id} of ledger {reader.path} went to a server of profile {facts['profile']!r}")
    guard = MessageGuard(index, mode, profile=profile)
    body = in_chat(step, received_object(reader.body(step.id), step.id, reader.path), reader, read)
    request = parse_request(body, images=passed_through)
    prompt = guard.ask(request, Scope(session.name, step.facts["is_conversation"], session.owner), body)
    bodies = tuple(json_bytes(request_body(facts["model"], prompt, fields)) for fields in facts["fields"])
    return SentAgain(step.id, step.session, bodies, list(map(body_digest, bodies)) == facts["digests"])
