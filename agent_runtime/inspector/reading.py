"""From what the guard found, and from the rows of a ledger, to the facts of steps and turns."""

from collections.abc import Mapping, Sequence
from typing import Any

from agent_runtime.guard.prompt import ReplayedPrompt
from agent_runtime.inspector.facts import CameBack, StepFacts, TurnFacts
from agent_runtime.ledger.reading import StepOutline


def came_back(replayed: ReplayedPrompt) -> CameBack | None:
    """How the turn that a prompt goes on from came back; None where it goes on from none that is known."""
    if replayed.place.parent is None:
        return None
    # The turn that ends a history is the last one checked; places of turns that stay left out are not of this turn.
    for check in reversed(replayed.replay.checks):
        if (check.verdict, check.reason) != ("missing", "dropped"):
            return CameBack(check.at, check.verdict, check.reason)
    return None


def new_step(number: int, session: int, replayed: ReplayedPrompt, form: str, now_ms: int) -> StepFacts:
    """The facts of a request that has just come."""
    place = replayed.place
    return StepFacts(
        id=number,
        session=session,
        name=place.scope.name,
        is_conversation=place.scope.is_conversation,
        parent=place.parent.id if place.parent is not None else None,
        created_ms=now_ms,
        form=form,
        encoded_tokens=replayed.prompt_tokens,
        replay=replayed.replay.facts(),
        came_back=came_back(replayed),
        images=len(replayed.images),
        running=True,
    )


def stored_step(outline: StepOutline) -> StepFacts:
    """The facts of a step on record. What an older gateway did not write down is left out."""
    step, facts = outline.step, outline.step.facts
    turns = [_stored_turn(*turn) for turn in outline.turns]
    back = facts.get("came_back")
    return StepFacts(
        id=step.id,
        session=step.session,
        name=outline.name,
        is_conversation=bool(facts.get("is_conversation", True)),
        parent=step.parent,
        created_ms=step.created_ms,
        form=str(facts.get("form", "chat")),
        encoded_tokens=step.prompt_tokens,
        replay=facts["replay"],
        came_back=None if back is None else CameBack(*back),
        images=int(facts.get("images", 0)),
        abandoned_from=facts.get("abandoned_from"),
        began_ms=min((known["began_ms"] for *_, known in outline.turns if "began_ms" in known), default=None),
        ended_ms=max((turn.ended_ms for turn in turns), default=None),
        turns=turns,
    )


def _stored_turn(number: int, choice: int, ended_ms: int, facts: Mapping[str, Any]) -> TurnFacts:
    usage = facts["usage"]
    return turn_facts(
        number,
        choice,
        ended_ms,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        output_tokens=usage["completion_tokens"],
        think_tokens=usage["completion_tokens_details"]["reasoning_tokens"],
        call_tokens=facts.get("call_tokens", 0),
        finish=facts["finish"],
        warnings=facts.get("warnings", ()),
        limit=facts.get("why_not_more"),
    )


def turn_facts(
    number: int,
    choice: int,
    ended_ms: int,
    *,
    prompt_tokens: int,
    cached_tokens: int,
    output_tokens: int,
    think_tokens: int,
    call_tokens: int,
    finish: str,
    warnings: Sequence[str] = (),
    limit: str | None = None,
) -> TurnFacts:
    """The facts of an answer; what is neither thinking nor calls is text, with the structure around it."""
    return TurnFacts(
        id=number,
        choice=choice,
        ended_ms=ended_ms,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        think_tokens=think_tokens,
        text_tokens=output_tokens - think_tokens - call_tokens,
        call_tokens=call_tokens,
        finish=finish,
        warnings=tuple(warnings),
        limit=limit,
    )
