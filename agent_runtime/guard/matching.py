"""Which recorded turn each assistant message of a history is: decided by evidence, never by what came last; no I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from agent_runtime.guard.fingerprint import START, Fingerprints, joined, tools_digest
from agent_runtime.guard.rejoin import Entry, rejoined
from agent_runtime.ledger.turns import KnownTurn, TurnIndex
from k3_sglang.chat.toolresults import name_results
from k3_sglang.chat.types import Channel, ChatRequest, Message

LOOSE_START = b"\1" * len(START)
"""Where chains without system messages begin: they never equal a whole one."""

Restored = Literal["split", "text", "dropped"]


@dataclass(slots=True)
class Step:
    """One assistant turn of a history.

    ``index`` is its place in the messages received, or the place at which it is missing (``restored`` "dropped").
    ``turn`` is what it was found to be; ``edited`` is the recorded turn that it was made from when its text or its
    calls were changed; ``ambiguous`` says that several turns with different thinking could be it. The digests are
    those of `TurnKeys`.
    """

    index: int
    message: Message
    visible: bytes
    between: bytes = START
    between_loose: bytes = START
    before: bytes = START
    chain: bytes = START
    loose: bytes = LOOSE_START
    turn: KnownTurn | None = None
    restored: Restored | None = None
    edited: KnownTurn | None = None
    ambiguous: bool = False
    gaps: list[tuple[int, bytes, bytes]] = field(default_factory=list[tuple[int, bytes, bytes]])
    """Where a turn before this one may have been dropped: index, digest of what precedes it since the last turn, and
    of what follows it up to this one."""


@dataclass(frozen=True, slots=True)
class Matched:
    """A history, turn by turn, and where a turn generated now will stand.

    ``dropped`` are places where a recorded turn was left out and not put back.
    """

    messages: tuple[tuple[int, Message], ...]
    steps: tuple[Step, ...]
    end: Step
    dropped: tuple[int, ...]

    @property
    def last(self) -> KnownTurn | None:
        """The turn that ends the history, if it is known."""
        return self.steps[-1].turn if self.steps else None


@dataclass(frozen=True, slots=True)
class Asking:
    """What a request says about itself: the name of its conversation, "" without one, its channel and its tools."""

    scope: str
    start: Channel
    tools: bytes


def match(request: ChatRequest, scope: str, index: TurnIndex, prints: Fingerprints) -> Matched:
    """Find the turns of a request's history among the recorded ones.

    Evidence, strongest first: a call id that was made here; the turn after it, generated with it in its history; the
    turn before it; the whole conversation up to it, within the client's session. Where two turns with different
    thinking fit equally well, none is taken.
    """
    asking = Asking(scope, request.start, tools_digest(request.tools))
    with index.lock:
        entries = rejoined(request.messages, index, prints)
        steps, end = _steps(entries, prints)
        for step in steps:
            _anchor(step, index)
        steps, dropped = _chained(steps, end, asking, index)
        _settle(steps, asking, index)
        index.touch(step.turn.id for step in steps if step.turn is not None)
    return Matched(tuple((entry.index, entry.message) for entry in entries), tuple(steps), end, tuple(dropped))


def _steps(entries: Sequence[Entry], prints: Fingerprints) -> tuple[list[Step], Step]:
    """The assistant turns, and a step for the turn that is asked for now."""
    steps: list[Step] = []
    seen: list[tuple[int, str, bytes]] = []
    for position, message, result in name_results([entry.message for entry in entries]):
        entry = entries[position]
        if message.role != "assistant":
            seen.append((entry.index, message.role, prints.message(message, result)))
            continue
        step = Step(entry.index, message, prints.visible(message), turn=entry.turn, restored=entry.restored)
        _set_between(step, seen)
        steps.append(step)
        seen = []
    end = Step(len(entries), Message("assistant"), START)
    _set_between(end, seen)
    return steps, end


def _set_between(step: Step, seen: Sequence[tuple[int, str, bytes]]) -> None:
    step.between = _run(digest for _, _, digest in seen)
    has_system = any(role == "system" for _, role, _ in seen)
    step.between_loose = _run(digest for _, role, digest in seen if role != "system") if has_system else step.between
    if len(seen) > 1:
        digests = [digest for _, _, digest in seen]
        for place, ((_, before, _), (index, role, _)) in enumerate(pairwise(seen), 1):
            if role == "user" and before != "system":
                step.gaps.append((index, _run(digests[:place]), _run(digests[place:])))


def _run(digests: Iterable[bytes]) -> bytes:
    known = tuple(digests)
    return known[0] if len(known) == 1 else joined(*known)


def _anchor(step: Step, index: TurnIndex) -> None:
    """By the ids of its calls, which are made here and never twice."""
    if step.turn is not None:
        return
    found = {turn.id: turn for call in step.message.tool_calls if (turn := index.by_call(call.id)) is not None}
    if len(found) != 1:
        return
    turn = next(iter(found.values()))
    if turn.keys.visible == step.visible:
        step.turn = turn
    else:
        step.edited = turn


def _chained(steps: list[Step], end: Step, asking: Asking, index: TurnIndex) -> tuple[list[Step], list[int]]:
    """Give every step its place in the conversation; put turns back that the client has dropped."""
    chained: list[Step] = []
    dropped: list[int] = []
    last: Step | None = None
    for step in (*steps, end):
        for gap, before, after in step.gaps:
            missing = _dropped_turn(last, step, before, after, index, is_end=step is end)
            if missing is None:
                continue
            if not asking.scope or missing.scope != asking.scope:
                dropped.append(gap)
                continue
            back = Step(gap, missing.message, missing.keys.visible, before, before, turn=missing, restored="dropped")
            _link(back, last)
            chained.append(back)
            last = back
            step.between = step.between_loose = after
            break
        _link(step, last)
        chained.append(step)
        last = step
    return chained[:-1], dropped


def _dropped_turn(
    last: Step | None, step: Step, before: bytes, after: bytes, index: TurnIndex, *, is_end: bool
) -> KnownTurn | None:
    """The one turn that was generated at a gap and from which the history went on.

    It went on from it when the following turn was generated with it in its history, or when nothing was generated
    since.
    """
    place = joined(START if last is None else last.chain, before)
    known = [turn for turn in index.after(place) if turn.ids is not None and not turn.message.tool_calls]
    if is_end:
        fitting = [turn for turn in known if not index.children(turn.id)]
    else:
        fitting = [
            turn
            for turn in known
            if any(
                child.keys.between == after and child.keys.visible == step.visible for child in index.children(turn.id)
            )
        ]
    return fitting[0] if len(fitting) == len(known) == 1 else None


def _link(step: Step, last: Step | None) -> None:
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


def _settle(steps: list[Step], asking: Asking, index: TurnIndex) -> None:
    """Spread what is known to the turns beside it, and look the others up by their conversation, until nothing new."""
    changed = True
    while changed:
        changed = False
        for place in range(len(steps) - 1, -1, -1):
            before = steps[place - 1] if place else None
            changed |= _find(steps[place], before, asking, index)
            changed |= before is not None and _parent(steps[place], before, index)
        if changed:
            for before, step in pairwise(steps):
                _find(step, before, asking, index)


def _parent(step: Step, before: Step, index: TurnIndex) -> bool:
    """Whether the turn before could be told from this one, which was generated with it in its history."""
    known = step.turn
    if known is None or known.parent is None or before.turn is not None or known.keys.between != step.between:
        return False
    parent = index.get(known.parent)
    if parent is None or parent.keys.visible != before.visible:
        return False
    before.turn, before.ambiguous = parent, False
    return True


def _find(step: Step, before: Step | None, asking: Asking, index: TurnIndex) -> bool:
    """Whether a step could be found by its conversation."""
    if step.turn is not None or step.edited is not None:
        return False
    known = list(index.by_chain(step.chain))
    parent = before.turn if before is not None else None
    if parent is not None:
        known += [
            turn
            for turn in index.children(parent.id)
            if turn.keys.between == step.between and turn.keys.visible == step.visible and turn not in known
        ]
    if not known and asking.scope:
        known = [turn for turn in index.by_loose(step.loose) if turn.scope == asking.scope]
    fitting = _fitting(known, step, parent, asking)
    if not fitting:
        return False
    is_said = bool(thinking(step.message)) and thinking(fitting[0].message) == thinking(step.message)
    is_child = parent is not None and fitting[0].parent == parent.id
    thinned = not (is_said or is_child) and (index.is_thinned(step.chain) or index.is_thinned(step.loose))
    if len({thinking(turn.message) for turn in fitting}) > 1 or thinned:
        step.ambiguous = True
        return False
    step.turn = max(fitting, key=lambda turn: (turn.ids is not None and turn.start == asking.start, turn.id))
    step.ambiguous = False
    return True


def _fitting(known: list[KnownTurn], step: Step, parent: KnownTurn | None, asking: Asking) -> list[KnownTurn]:
    """Of the turns at a step's place, those it may be: the ones with the thinking that was sent, if there are any;
    else those of the client's own session that were generated after the turn before it."""
    sent = thinking(step.message)
    said = [turn for turn in known if thinking(turn.message) == sent] if sent else []
    if said:
        own = [turn for turn in said if turn.scope == asking.scope] or said
        children = [turn for turn in own if parent is not None and turn.parent == parent.id]
        return children or own
    children = [turn for turn in known if parent is not None and turn.parent == parent.id]
    if children:
        return children
    return [
        turn
        for turn in known
        if turn.scope == asking.scope
        and (bool(asking.scope) or turn.keys.tools == asking.tools)
        and (parent is None or turn.parent is None)
    ]


def thinking(message: Message) -> str:
    """The thinking of a turn as it is compared: white space around it says nothing."""
    return (message.reasoning or "").strip()
