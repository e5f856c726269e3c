"""Turns that a client has left out of its history: which they are, and whether they are put back."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from agent_runtime.guard.fingerprint import START, joined
from agent_runtime.guard.history import Asking, Said, Step, link, run_digest, set_between
from agent_runtime.ledger.turns import KnownTurn, TurnIndex


def chained(steps: list[Step], end: Step, asking: Asking, index: TurnIndex) -> tuple[list[Step], list[int]]:
    """Give every step its place in the conversation; put turns back that the client has dropped.

    They are put back in a conversation that the client has named, else only told of.
    """
    placed: list[Step] = []
    dropped: list[int] = []
    last: Step | None = None
    for step in (*steps, end):
        for place in _gaps(step.run) if len(step.run) > 1 else ():
            # What was put back before splits the run.
            run = step.run[len(step.run) - step.run_len :]
            at = place - (len(step.run) - step.run_len)
            known = _left_out(last, run_digest(run[:at]), asking, index)
            missing = known[0] if len(known) == 1 else None
            certain = missing is not None and (
                _is_left_out_again(missing, run[at:], index)
                if step is end
                else _went_on(missing, step, run[at:], index)
            )
            if missing is None or not certain or not asking.is_conversation:
                if certain or any(_may_go_on(turn, run[at:], index) for turn in known):
                    dropped.append(run[at].at)
                continue
            back = Step(run[at].at, missing.message, missing.keys.visible, turn=missing, restored="dropped")
            set_between(back, run[:at])
            link(back, last)
            placed.append(back)
            last = back
            step.run_len = len(run) - at
            step.between = step.between_loose = run_digest(run[at:])
        link(step, last)
        placed.append(step)
        last = step
    return placed[:-1], dropped


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


def _went_on(turn: KnownTurn, step: Step, run: Sequence[Said], index: TurnIndex) -> bool:
    """Whether the following turn was generated with this one in its history; turns dropped too may stand between."""
    for child in index.children(turn.id):
        if child.keys.visible == step.visible and child.keys.between == run_digest(run):
            return True
        if any(_went_on(child, step, rest, index) for rest in _behind(child, run)):
            return True
    return False


def _is_left_out_again(turn: KnownTurn, run: Sequence[Said], index: TurnIndex) -> bool:
    """Whether nothing was generated after this turn, or only turns for which it was put back, dropped in their turn.

    A client that sent it once and drops it now has compacted its history; nothing is put back then.
    """
    children = index.children(turn.id)
    return not children or any(
        child.put_back and _is_left_out_again(child, rest, index) for child in children for rest in _behind(child, run)
    )


def _may_go_on(turn: KnownTurn, run: Sequence[Said], index: TurnIndex) -> bool:
    """Whether nothing was generated after this turn, or only what has been dropped too."""
    children = index.children(turn.id)
    return not children or any(_may_go_on(child, rest, index) for child in children for rest in _behind(child, run))


def _behind(turn: KnownTurn, run: Sequence[Said]) -> Iterator[Sequence[Said]]:
    """What follows a turn that was dropped from a run, if it was."""
    if _may_be_dropped(turn):
        yield from (run[place:] for place in _gaps(run) if run_digest(run[:place]) == turn.keys.between)
