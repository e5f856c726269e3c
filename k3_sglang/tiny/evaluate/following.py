"""Conversations with one right answer each turn: the model goes on from what it wrote until it is wrong once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from agent_runtime.engine.openai_chat import ChatClient
from k3_sglang.tiny.data.chatter import copying, small_talk
from k3_sglang.tiny.data.facts import KEPT
from k3_sglang.tiny.data.filework import file_work
from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.data.reviewing import review
from k3_sglang.tiny.data.summary import remembered, resumed
from k3_sglang.tiny.data.tooluse import tool_use
from k3_sglang.tiny.evaluate.asking import Calls, Chat, calls, written
from k3_sglang.tiny.evaluate.outcome import Case

MAKERS: Final = {
    "chat": small_talk,
    "copy": copying,
    "tools": tool_use,
    "files": file_work,
    "remembered": remembered,
    "resumed": resumed,
    "review": review,
}


async def follow(client: ChatClient, skill: str, draw: Draw) -> Case:
    """One conversation, with a verdict on each turn; it ends at the first wrong one.

    Turns of the assistant that the user's words do not determine (choosing a secret) are given, not asked for.
    """
    talk = MAKERS[skill](draw)
    case = Case()
    chat = Chat(client, f"eval/{draw.name()}{draw.number()}", talk.tools)
    whole, place = f"{skill}: whole conversation", 0
    case.verdicts[whole] = True
    while place < len(talk.messages):
        message = talk.messages[place]
        place += 1
        if message["role"] != "assistant" or message["content"] == KEPT:
            chat.add(message)
            continue
        turn = await chat.ask()
        case.outputs.append(written(turn))
        wanted = expected_calls(message)
        right = calls(turn) == wanted if wanted else not turn.tool_calls and turn.content == message["content"]
        case.turns.append((_measure(skill, wanted), right))
        if not right:
            case.verdicts[whole] = False
            case.problem = json.dumps([message["content"], wanted], ensure_ascii=False)
            break
        for number in range(len(wanted)):
            chat.result(turn, number, talk.messages[place]["content"])
            place += 1
    return case


def expected_calls(message: Mapping[str, Any]) -> Calls:
    """The calls of a message of the training data."""
    made = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in made]


def _measure(skill: str, wanted: Calls) -> str:
    if not wanted:
        return f"{skill}: answer"
    return f"{skill}: calls side by side" if len(wanted) > 1 else f"{skill}: call"
