"""Stopping, steering and bounding a run, and answers in a wanted form."""

import asyncio

import pytest
from pydantic import BaseModel, ConfigDict

from agent_runtime.conversation import AssistantTurn, ConversationError, Usage
from agent_runtime.events import Event, RunStatus, ToolStarted
from agent_runtime.limits import Limits
from agent_runtime.loop import Agent
from agent_runtime.tools.registry import ToolRegistry, tool
from tests.agent.scripted_model import ScriptedModel, Seen, turn


@tool
async def look() -> str:
    """Looks."""
    return "seen"


@tool
async def hangs() -> str:
    """Never returns."""
    await asyncio.Event().wait()
    return ""


async def test_an_interrupt_ends_the_run_after_the_step() -> None:
    agent = Agent(ScriptedModel([turn("", ("look", "{}"))]), ToolRegistry([look]))

    def stop(event: Event) -> None:
        if isinstance(event, ToolStarted):
            agent.interrupt()

    result = await agent.run("go", on_event=stop)
    assert result.status is RunStatus.INTERRUPTED and len(result.steps) == 1
    assert result.steps[0].tools[0].result.model == "seen"


async def test_an_interrupt_at_once_cancels_tools_and_leaves_a_valid_history() -> None:
    agent = Agent(ScriptedModel([turn("", ("hangs", "{}")), turn("ok")]), ToolRegistry([hangs]))

    def stop(event: Event) -> None:
        if isinstance(event, ToolStarted):
            agent.interrupt(now=True)

    result = await agent.run("go", on_event=stop)
    assert result.status is RunStatus.INTERRUPTED
    assert str(agent.conversation.messages[-1].content).startswith("Interrupted")
    assert (await agent.run("and now?")).text == "ok"
    agent.interrupt(now=True)  # nothing is running: nothing happens


async def test_an_interrupt_at_once_keeps_the_text_that_had_arrived() -> None:
    async def speaks(seen: Seen) -> AssistantTurn:
        agent.interrupt(now=True)
        await asyncio.Event().wait()
        raise AssertionError

    agent = Agent(ScriptedModel([speaks]), ToolRegistry())
    assert (await agent.run("go")).status is RunStatus.INTERRUPTED


async def test_what_the_user_says_meanwhile_comes_at_the_next_step_boundary() -> None:
    model = ScriptedModel([turn("", ("look", "{}")), turn("done"), turn("then this")])
    agent = Agent(model, ToolRegistry([look]))
    said = iter(["be quick", "and then?"])

    def speak(event: Event) -> None:
        if type(event).__name__ == "StepStarted" and (text := next(said, None)):
            agent.say(text)

    result = await agent.run("go", on_event=speak)
    assert result.text == "then this"
    assert [m.content for m in agent.conversation.messages if m.role == "user"] == ["go", "be quick", "and then?"]
    assert [m.role for m in model.seen[1].messages] == ["user", "assistant", "tool", "user"]
    with pytest.raises(ConversationError, match="blank user message"):
        agent.say(" ")


async def test_the_budget_of_tool_calls_cuts_a_turn_and_ends_the_run() -> None:
    ran: list[int] = []

    @tool
    async def count(n: int) -> str:
        """Counts.

        Args:
            n: Which.
        """
        ran.append(n)
        return "x"

    batch = turn("", *(("count", f'{{"n": {n}}}') for n in range(4)))
    agent = Agent(ScriptedModel([batch]), ToolRegistry([count]), limits=Limits(tool_calls=6))
    result = await agent.run("go")
    assert result.status is RunStatus.TOOL_BUDGET and len(ran) == 6 and len(result.steps) == 2
    assert "tool calls allowed for this task are used up" in result.steps[1].tools[3].result.model


async def test_usage_of_a_run_is_split_into_cached_and_computed() -> None:
    model = ScriptedModel([turn("", ("look", "{}"), usage=Usage(100, 10, 60)), turn("done", usage=Usage(130, 5, 110))])
    result = await Agent(model, ToolRegistry([look])).run("go")
    assert (result.usage.prompt_tokens, result.usage.cached_tokens, result.usage.completion_tokens) == (230, 170, 15)
    assert result.usage.extend_tokens == 60


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    people: int


async def test_an_answer_that_has_the_form_already_costs_no_call() -> None:
    model = ScriptedModel([turn('```json\n{"name": "Rome", "people": 3}\n```')])
    result = await Agent(model, ToolRegistry()).run("go", output=City)
    assert result.output == City(name="Rome", people=3) and len(model.seen) == 1


async def test_the_form_is_asked_for_at_the_end_of_the_history_and_checked() -> None:
    model = ScriptedModel(
        [turn("", ("look", "{}")), turn("Rome has 3."), turn('{"name": "Rome"}'), turn('{"name":"Rome","people":3}')]
    )
    result = await Agent(model, ToolRegistry([look])).run("go", output=City)
    assert result.completed and result.output == City(name="Rome", people=3)
    formats = [seen.options.response_format for seen in model.seen]
    wanted = formats[2]
    assert formats == [None, None, wanted, wanted] and wanted is not None
    assert wanted["json_schema"]["schema"]["required"] == ["name", "people"]
    for earlier, later in zip(model.seen, model.seen[1:], strict=False):
        assert later.messages[: len(earlier.messages)] == earlier.messages and later.tools == earlier.tools
    assert "people: Field required" in str(model.seen[3].messages[-1].content)


async def test_an_answer_that_never_gets_the_form_is_no_success() -> None:
    model = ScriptedModel([turn("no")])
    result = await Agent(model, ToolRegistry(), limits=Limits(output_tries=2)).run("go", output=City)
    assert result.status is RunStatus.INVALID_OUTPUT and result.output is None and len(model.seen) == 3


async def test_case17_prose_and_calls_of_one_turn_are_one_message() -> None:
    """local-inference-lab/vllm#395: stored as two messages, the model learns to stop after the prose."""
    model = ScriptedModel([turn("let me look", ("look", "{}")), turn("done")])
    await Agent(model, ToolRegistry([look])).run("go")
    answer = model.seen[1].messages[1]
    assert (answer.content, answer.reasoning, len(answer.tool_calls)) == ("let me look", "think", 1)
    assert [m.role for m in model.seen[1].messages] == ["user", "assistant", "tool"]


async def test_case03_no_model_name_decides_whether_thinking_goes_back() -> None:
    """litellm#26156: thinking was lost for a model that was missing in a table. There is no table here."""
    model = ScriptedModel([turn("", ("look", "{}"), reasoning="R1"), turn("done")])
    await Agent(model, ToolRegistry([look])).run("go")
    assert model.seen[1].messages[1].reasoning == "R1"
