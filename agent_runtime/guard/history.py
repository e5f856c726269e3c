"""A history as the guard sees it: its turns, what stands between them, and the digests of their places."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from agent_runtime.guard.fingerprint import START, Fingerprints, joined, tools_digest
from agent_runtime.guard.rejoin import Restored
from agent_runtime.ledger.turns import KnownTurn
from k3_sglang.chat.toolresults import name_results
from k3_sglang.chat.types import Channel, ChatRequest, Message, Role

LOOSE_START = b"\1" * len(START)
"""Where chains without system messages begin: they never equal a whole one."""

_NOT_YET = Message("assistant")


class Scope(NamedTuple):
    """The client's name for a conversation, "" when it gives none; whether it is one conversation's or a person's.

    ``owner`` is whose key it came with, "" where there are no keys. Each owner's turns are in an index of their own.
    """

    name: str
    is_conversation: bool = True
    owner: str = ""


NAMELESS = Scope("", is_conversation=False)


class Said(NamedTuple):
    """A message between two turns: its place in the messages received, its role and its digest."""

    at: int
    role: Role
    digest: bytes


@dataclass(slots=True)
class Step:
    """One assistant turn of a history.

    ``index`` is its place in the messages received, or the place at which it is missing (``restored`` "dropped").
    ``turn`` is what it was found to be; ``edited`` is the recorded turn that it was made from when its text or its
    calls were changed; ``signed`` is the turn whose signature it bears though it says something else; ``ambiguous``
    says that several turns with different thinking could be it. The digests are those of `TurnKeys`.
    """

    index: int
    message: Message
    visible: bytes
    between: bytes = START
    latest: bytes = START
    between_loose: bytes = START
    before: bytes = START
    chain: bytes = START
    loose: bytes = LOOSE_START
    turn: KnownTurn | None = None
    restored: Restored | Literal["dropped"] | None = None
    edited: KnownTurn | None = None
    signed: KnownTurn | None = None
    ambiguous: bool = False
    run: Sequence[Said] = ()
    run_len: int = 0
    """What stands between the turn before, as received, and this one; and how much of it, from the end, when turns
    that were dropped are back in their places."""


@dataclass(frozen=True, slots=True)
class Matched:
    """A history, turn by turn, and where a turn generated now will stand.

    ``messages`` are those received, runs that were one turn joined; ``indices`` their places in the request.
    ``dropped`` are places where a recorded turn was left out and not put back.
    """

    messages: Sequence[Message]
    indices: Sequence[int]
    steps: Sequence[Step]
    end: Step
    dropped: tuple[int, ...]

    @property
    def last(self) -> KnownTurn | None:
        """The turn that ends the history, if it is known."""
        return self.steps[-1].turn if self.steps else None


@dataclass(frozen=True)
class Asking:
    """What a request says about itself: the name of its conversation, "" without one, its channel and its tools."""

    scope: str
    is_conversation: bool
    start: Channel
    request: ChatRequest

    @cached_property
    def tools(self) -> bytes:
        """Digest of the tools; needed for nameless conversations only."""
        return tools_digest(self.request.tools)


def history_steps(messages: Sequence[Message], indices: Sequence[int], prints: Fingerprints) -> tuple[list[Step], Step]:
    """The assistant turns, and a step for the turn that is asked for now."""
    steps: list[Step] = []
    seen: list[Said] = []
    for position, message, result in name_results(messages):
        if message.role != "assistant":
            seen.append(Said(indices[position], message.role, prints.message(message, result)))
            continue
        step = Step(indices[position], message, prints.visible(message))
        set_between(step, seen)
        steps.append(step)
        seen = []
    end = Step(len(messages), _NOT_YET, START)
    set_between(end, seen)
    return steps, end


def set_between(step: Step, run: Sequence[Said]) -> None:
    """Tell a step what stands between the turn before and it."""
    if len(run) == 1 and run[0].role != "system":
        step.run, step.run_len = run, 1
        step.latest = step.between = step.between_loose = run[0].digest
        return
    step.run = run
    step.run_len = len(run)
    step.latest = run[-1].digest if run else START
    step.between = run_digest(run)
    step.between_loose = step.between
    if any(said.role == "system" for said in run):
        step.between_loose = run_digest([said for said in run if said.role != "system"])


def run_digest(run: Sequence[Said]) -> bytes:
    """Digest of messages in order."""
    return run[0].digest if len(run) == 1 else joined(*(said.digest for said in run))


def link(step: Step, last: Step | None) -> None:
    """The digests of a step's place; they need no computing where the recorded turns already stand so."""
    known = step.turn
    if (
        known is not None
        and last is not None
        and last.turn is not None
        and known.parent == last.turn.id
        and known.keys.between == step.between
        and last.chain == last.turn.keys.chain
        and last.loose == last.turn.keys.loose
        and step.between_loose is step.between
    ):
        step.before, step.chain, step.loose = known.keys.before, known.keys.chain, known.keys.loose
        return
    step.before = joined(START if last is None else last.chain, step.between)
    step.chain = joined(step.before, step.visible)
    step.loose = joined(joined(LOOSE_START if last is None else last.loose, step.between_loose), step.visible)


def thinking(message: Message) -> str:
    """The thinking of a turn as it is compared: white space around it says nothing."""
    return (message.reasoning or "").strip()
