"""Which recorded turn each assistant message of a history is: decided by evidence, never by what came last; no I/O."""

from collections.abc import Sequence

from agent_runtime.guard.fingerprint import Fingerprints, joined
from agent_runtime.guard.history import Asking, Matched, Scope, Step, history_steps, thinking
from agent_runtime.guard.left_out import chained
from agent_runtime.guard.rejoin import rejoined
from agent_runtime.ledger.call_ids import is_own
from agent_runtime.ledger.turns import KnownTurn, TurnIndex
from k3_sglang.chat.types import ChatRequest

_MAX_RIVALS = 64


def match(request: ChatRequest, scope: Scope, index: TurnIndex, prints: Fingerprints) -> Matched:
    """Find the turns of a request's history among the recorded ones.

    Evidence, strongest first: a signature or a call id, which were made here; the turn after it, generated with it in
    its history; the turn before it; the whole conversation up to it, within the client's session. Where two turns with
    different thinking fit equally well, none is taken.
    """
    asking = Asking(scope.name, scope.is_conversation, request.start, request)
    with index.lock:
        messages, indices, restored = rejoined(request.messages, index, prints)
        steps, end = history_steps(messages, indices, prints)
        for step in steps:
            if step.index in restored:
                step.turn, step.restored = restored[step.index]
            else:
                _anchor(step, index)
        steps, dropped = chained(steps, end, asking, index)
        _settle(steps, asking, index)
        _keep_edited(steps)
        index.touch([step.turn.id for step in steps if step.turn is not None])
    return Matched(messages, indices, steps, end, tuple(dropped))


def _anchor(step: Step, index: TurnIndex) -> None:
    """By its signature, or else by the ids of its calls: both are made here and never twice."""
    signature = step.message.signature
    turn = index.by_signature(signature) if signature else None
    if turn is not None and turn.keys.visible != step.visible:
        step.signed, turn = turn, None
    for call in step.message.tool_calls if turn is None else ():
        found = index.by_call(call.id)
        if found is not None and found is not turn:
            if turn is not None:
                return
            turn = found
    if turn is None:
        return
    if turn.keys.visible == step.visible:
        step.turn = turn
    else:
        step.edited = turn


def _keep_edited(steps: Sequence[Step]) -> None:
    """Of steps that say something else than the turn whose signature they bear: those that stand in its place.

    There its text was changed. Anywhere else the signature was mixed up, and its thinking is not the step's.
    """
    told = {step.turn.id for step in steps if step.turn is not None}
    last: KnownTurn | None = None
    for step in steps:
        signed = step.signed
        if signed is not None and step.turn is None and step.edited is None and signed.id not in told:
            is_next = signed.keys.between == step.between and signed.parent == (None if last is None else last.id)
            if signed.keys.before == step.before or (last is not None and is_next):
                step.edited = signed
        last = step.turn or step.edited


def _settle(steps: list[Step], asking: Asking, index: TurnIndex) -> None:
    """Spread what is known to the turns beside it, and look the others up by their conversation, until nothing new.

    Of turns that differ in nothing but their ids, none is taken before all else has been told.
    """
    for any_spelling in (False, True):
        changed = True
        while changed:
            # Only these and the turns after them can change anything: of a long history most are found by their calls.
            open_places = [place for place, step in enumerate(steps) if step.turn is None]
            changed = False
            for place in _with_next(open_places, len(steps)):
                changed |= _find(steps, place, asking, index, any_spelling=any_spelling)
                changed |= place > 0 and _parent(steps[place], steps[place - 1], index)
            for place in open_places if changed else ():
                _find(steps, place, asking, index, any_spelling=any_spelling)


def _with_next(places: Sequence[int], end: int) -> list[int]:
    """The places and the ones after them, from the last to the first."""
    return sorted({near for place in places for near in (place, place + 1) if near < end}, reverse=True)


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
