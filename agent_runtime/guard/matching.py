"""Which recorded turn each assistant message of a history is: decided by evidence, never by what came last; no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from agent_runtime.guard.fingerprint import START, Fingerprints, joined, tools_digest
from agent_runtime.guard.rejoin import Entry, rejoined
from agent_runtime.ledger.call_ids import is_own
from agent_runtime.ledger.turns import KnownTurn, TurnIndex
from k3_sglang.chat.toolresults import name_results
from k3_sglang.chat.types import Channel, ChatRequest, Message, Role

LOOSE_START = b"\1" * len(START)
"""Where chains without system messages begin: they never equal a whole one."""

Restored = Literal["split", "text", "dropped"]
_MAX_RIVALS = 64


class Said(NamedTuple):
    """A message between two turns: its place in the messages received, its role and its digest."""

    index: int
    role: Role
    digest: bytes


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
    latest: bytes = START
    between_loose: bytes = START
    before: bytes = START
    chain: bytes = START
    loose: bytes = LOOSE_START
    turn: KnownTurn | None = None
    restored: Restored | None = None
    edited: KnownTurn | None = None
    ambiguous: bool = False
    run: Sequence[Said] = ()
    run_len: int = 0
    """What stands between the turn before, as received, and this one; and how much of it, from the end, when turns
    that were dropped are back in their places."""


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
    seen: list[Said] = []
    for position, message, result in name_results([entry.message for entry in entries]):
        entry = entries[position]
        if message.role != "assistant":
            seen.append(Said(entry.index, message.role, prints.message(message, result)))
            continue
        step = Step(entry.index, message, prints.visible(message), turn=entry.turn, restored=entry.restored)
        _set_between(step, seen)
        steps.append(step)
        seen = []
    end = Step(len(entries), Message("assistant"), START)
    _set_between(end, seen)
    return steps, end


def _set_between(step: Step, run: Sequence[Said]) -> None:
    step.run = run
    step.run_len = len(run)
    step.latest = run[-1].digest if run else START
    step.between = _run(run)
    spoken = [said for said in run if said.role != "system"]
    step.between_loose = step.between if len(spoken) == len(run) else _run(spoken)


def _run(run: Sequence[Said]) -> bytes:
    return run[0].digest if len(run) == 1 else joined(*(said.digest for said in run))


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
    """Give every step its place in the conversation; put turns back that the client has dropped.

    They are put back in a session that the client has named, else only told of.
    """
    chained: list[Step] = []
    dropped: list[int] = []
    last: Step | None = None
    for step in (*steps, end):
        for place in _gaps(step.run):
            # What was put back before splits the run.
            run = step.run[len(step.run) - step.run_len :]
            at = place - (len(step.run) - step.run_len)
            known = _left_out(last, _run(run[:at]), asking, index)
            missing = known[0] if len(known) == 1 else None
            if missing is not None and not _went_on(missing, step, run[at:], index, is_end=step is end):
                missing = None
            if missing is None or not asking.scope:
                if any(not index.children(turn.id) for turn in known) or missing is not None:
                    dropped.append(run[at].index)
                continue
            back = Step(run[at].index, missing.message, missing.keys.visible, turn=missing, restored="dropped")
            _set_between(back, run[:at])
            _link(back, last)
            chained.append(back)
            last = back
            step.run_len = len(run) - at
            step.between = step.between_loose = _run(run[at:])
        _link(step, last)
        chained.append(step)
        last = step
    return chained[:-1], dropped


def _gaps(run: Sequence[Said]) -> list[int]:
    """Places in a run at which a turn may have been dropped: the user speaks where the model should have."""
    return [
        place
        for place, (before, said) in enumerate(pairwise(run), 1)
        if said.role == "user" and before.role != "system"
    ]


def _left_out(last: Step | None, before: bytes, asking: Asking, index: TurnIndex) -> list[KnownTurn]:
    """The client's turns that were generated where the history has none: whole ones that called no tool."""
    return [
        turn
        for turn in index.after(joined(START if last is None else last.chain, before))
        if _may_be_dropped(turn)
        and turn.scope == asking.scope
        and (bool(asking.scope) or turn.keys.tools == asking.tools)
    ]


def _may_be_dropped(turn: KnownTurn) -> bool:
    return turn.ids is not None and not turn.message.tool_calls


def _went_on(turn: KnownTurn, step: Step, run: Sequence[Said], index: TurnIndex, *, is_end: bool) -> bool:
    """Whether the history goes on from a turn it does not have.

    It does when the following turn was generated with it in its history, or when nothing was generated since; turns
    that were dropped too may stand between.
    """
    children = index.children(turn.id)
    if is_end and not children:
        return True
    for child in children:
        if not is_end and child.keys.visible == step.visible and child.keys.between == _run(run):
            return True
        if _may_be_dropped(child):
            places = (place for place in _gaps(run) if _run(run[:place]) == child.keys.between)
            if any(_went_on(child, step, run[place:], index, is_end=is_end) for place in places):
                return True
    return False


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
    """Spread what is known to the turns beside it, and look the others up by their conversation, until nothing new.

    Of turns that differ in nothing but their ids, none is taken before all else has been told.
    """
    for any_spelling in (False, True):
        changed = True
        while changed:
            changed = False
            for place in range(len(steps) - 1, -1, -1):
                changed |= _find(steps, place, asking, index, any_spelling=any_spelling)
                changed |= place > 0 and _parent(steps[place], steps[place - 1], index)
            for place in range(len(steps)) if changed else ():
                _find(steps, place, asking, index, any_spelling=any_spelling)


def _parent(step: Step, before: Step, index: TurnIndex) -> bool:
    """Whether the turn before could be told from this one, which was generated with it in its history."""
    known = step.turn
    if known is None or known.parent is None or before.turn is not None or known.keys.between != step.between:
        return False
    parent = index.get(known.parent)
    if parent is None or parent.keys.visible != before.visible or _has_other_ids(before, parent):
        return False
    before.turn, before.ambiguous = parent, False
    return True


def _find(steps: Sequence[Step], place: int, asking: Asking, index: TurnIndex, *, any_spelling: bool) -> bool:
    """Whether a step could be found by its conversation."""
    step = steps[place]
    if step.turn is not None or step.edited is not None:
        return False
    before = steps[place - 1] if place else None
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
    if not fitting or (len(fitting) > 1 and not any_spelling):
        return False
    is_said = bool(thinking(step.message)) and thinking(fitting[0].message) == thinking(step.message)
    is_child = parent is not None and fitting[0].parent == parent.id
    unsure = len({thinking(turn.message) for turn in fitting}) > 1
    if not (is_said or is_child or unsure):
        unsure = _has_rival(steps, place, fitting[0], index)
    if unsure:
        step.ambiguous = True
        return False
    step.turn = max(fitting, key=lambda turn: (turn.ids is not None and turn.start == asking.start, turn.id))
    step.ambiguous = False
    return True


def _has_rival(steps: Sequence[Step], place: int, found: KnownTurn, index: TurnIndex) -> bool:
    """Whether another turn could be meant, by a client that has cut its history off or that is no longer known.

    A rival says the same with other thinking, and so did the turns before it, as far as the history goes.
    """
    step = steps[place]
    local = joined(step.latest, step.visible)
    if any(index.has_forgotten(key) for key in (step.chain, step.loose, local)):
        return True
    rivals = [
        turn
        for turn in index.alike(local)
        if turn.scope == found.scope and thinking(turn.message) != thinking(found.message)
    ]
    if len(rivals) > _MAX_RIVALS:
        return True
    return any(_fits_back(turn, steps, place, index) for turn in rivals)


def _fits_back(turn: KnownTurn, steps: Sequence[Step], place: int, index: TurnIndex) -> bool:
    for step in reversed(steps[: place + 1]):
        if turn.keys.visible != step.visible:
            return False
        parent = None if turn.parent is None else index.get(turn.parent)
        if parent is None:
            return True
        turn = parent
    return True


def _has_other_ids(step: Step, turn: KnownTurn) -> bool:
    """Whether a step's calls have ids that were made here, and not for this turn."""
    ids = {call.id for call in turn.message.tool_calls}
    return any(is_own(call.id) and call.id not in ids for call in step.message.tool_calls)


def _fitting(known: list[KnownTurn], step: Step, parent: KnownTurn | None, asking: Asking) -> list[KnownTurn]:
    """Of the turns at a step's place, those it may be: first the client's own session, then the thinking it sent."""
    known = [turn for turn in known if not _has_other_ids(step, turn)]
    children = [turn for turn in known if parent is not None and turn.parent == parent.id]
    own = [
        turn
        for turn in known
        if turn.scope == asking.scope
        and (bool(asking.scope) or turn.keys.tools == asking.tools)
        and (parent is None or turn.parent is None)
    ]
    sent = thinking(step.message)
    for group in (children, own, known) if sent else ():
        said = [turn for turn in group if thinking(turn.message) == sent]
        if said:
            return said
        if group and asking.scope:
            break
    return children or own


def thinking(message: Message) -> str:
    """The thinking of a turn as it is compared: white space around it says nothing."""
    return (message.reasoning or "").strip()
