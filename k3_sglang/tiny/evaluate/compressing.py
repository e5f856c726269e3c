"""Recall across a compression: the agent looks facts up, its history is compressed, and it is asked for them."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from agent_runtime.compression.trigger import CompressionSettings
from agent_runtime.engine.openai_chat import ChatClient
from agent_runtime.loop import Agent, AgentOptions, Limits
from agent_runtime.tools.registry import ToolRegistry, tool
from agent_runtime.tools.result import ToolError
from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.data.summary import LOOKUP_ASKS, RECALL_ASKS, planted
from k3_sglang.tiny.evaluate.outcome import Case
from k3_sglang.tiny.evaluate.recalling import said

_SETTINGS: Final = CompressionSettings(summary_tokens=600, user_tokens=2_000, user_head_tokens=500, max_calls=1)
_LIMITS: Final = Limits(max_steps=4)


async def compress(client: ChatClient, draw: Draw) -> Case:
    """Two to four facts that only tool results and answers hold, and one question for each."""
    facts = planted(draw, draw.rng.randint(2, 4))
    values = {fact.subject: fact.value for fact in facts}

    def lookup(subject: Annotated[str, Field(description="What to look up.")]) -> str:
        """Look up a fact."""
        if subject not in values:
            raise ToolError(f"nothing is known about {subject!r}")
        return values[subject]

    case = Case()
    session = f"eval/{draw.name()}{draw.number()}"
    options = AgentOptions(compression=_SETTINGS, session=session)
    agent = Agent(client, ToolRegistry([tool(lookup)]), limits=_LIMITS, options=options)
    for fact in facts:
        result = await agent.run(draw.pick(LOOKUP_ASKS).format(fact.subject))
        case.outputs.append(result.text)
        case.verdicts["compression: looked up before"] = case.verdicts.get("compression: looked up before", True) and (
            said(fact.value, result.text)
        )
    finished = await agent.compress()
    case.verdicts["compression: summary written"] = finished.outcome == "compressed"
    if finished.outcome != "compressed":
        case.problem = finished.reason
        return case
    summary = str(agent.conversation.messages[-1].content)
    case.outputs.append(summary)
    case.turns += [("compression: one fact in the summary", said(fact.value, summary)) for fact in facts]
    case.verdicts["compression: all facts in the summary"] = all(said(fact.value, summary) for fact in facts)
    right = True
    for fact in draw.rng.sample(facts, len(facts)):
        result = await agent.run(draw.pick(RECALL_ASKS).format(fact.subject))
        case.outputs.append(result.text)
        case.turns.append(("compression: one fact recalled after it", said(fact.value, result.text)))
        if not case.turns[-1][1]:
            right, case.problem = False, fact.sentence
    case.verdicts["compression: all facts recalled after it"] = right
    return case
