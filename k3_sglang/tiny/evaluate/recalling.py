"""Facts in thinking: the same question with the thinking kept, dropped, put back by the gateway, or another's."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from agent_runtime.conversation import Message
from agent_runtime.engine.openai_chat import ChatClient
from k3_sglang.tiny.data.facts import UNKNOWN, Secret, question, secret
from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.evaluate.asking import Chat, written
from k3_sglang.tiny.evaluate.outcome import Case

_FACT: Final = re.compile(r"The (choice|number|code word) is (\S+)\.")


async def recall(greedy: ChatClient, sampled: ChatClient, draw: Draw) -> Case:
    """One secret that the model chooses at temperature 1, and asks for it four ways.

    Nothing but the model's own thinking holds the secret. Dropped and foreign thinking are asked about in sessions of
    their own, so that the gateway cannot put it right. `put back` drops it too, but in the session it was written in:
    what a client does that forgets thinking.
    """
    wanted = secret(draw)
    case = Case(greedy=False)
    session = f"eval/{draw.name()}{draw.number()}"
    first = Chat(sampled, session)
    first.messages.append(Message(role="user", content=wanted.ask(draw)))
    turn = await first.ask()
    case.outputs.append(written(turn))
    found = _FACT.search(turn.reasoning)
    kind = "choice of a list" if wanted.options else wanted.noun
    case.verdicts["facts: chosen in thinking, not said"] = found is not None and found[2] not in turn.content
    if found is None or found[2] in turn.content:
        case.problem = f"no secret {wanted.noun} in the thinking only"
        return case
    value = found[2]
    asked = Message(role="user", content=question(draw, wanted.noun))
    other = _other(draw, wanted, value)
    ways = (
        ("kept", turn.reasoning, session),
        ("put back", "", session),
        ("dropped", "", f"{session}-dropped"),
        ("foreign", other.thought, f"{session}-foreign"),
    )
    for way, thinking, name in ways:
        history = [first.messages[0], replace(turn.message(), reasoning=thinking), asked]
        chat = Chat(greedy, name, messages=history)
        answer = await chat.ask()
        case.outputs.append(written(answer))
        case.verdicts[f"facts, thinking {way}: {kind}"] = said(value, answer.content)
        case.verdicts[f"facts, thinking {way}: all"] = said(value, answer.content)
        if way == "dropped":
            case.verdicts["facts, thinking dropped: says it does not know"] = answer.content == UNKNOWN
        if way == "foreign":
            case.verdicts["facts, thinking foreign: says the foreign one"] = said(other.value, answer.content)
    return case


def said(value: str, text: str) -> bool:
    """Whether a text holds a value as a word of its own."""
    return re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", text) is not None


def _other(draw: Draw, wanted: Secret, value: str) -> Secret:
    """A secret of the same kind that another conversation might have had, with another value."""
    while True:
        if wanted.options:
            found = replace(wanted, value=draw.pick(wanted.options))
        elif wanted.noun == "number":
            found = replace(wanted, value=str(draw.rng.randint(10, 99)))
        else:
            found = replace(wanted, value=draw.name(3))
        if found.value != value:
            return found
