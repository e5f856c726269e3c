"""Sub-agents share the prefix of their parent, and tools that come later stand at the end of the history."""

import asyncio
import json

import pytest

from agent_runtime.conversation import AssistantTurn, Conversation, Message, Usage
from agent_runtime.engine.openai_chat import ChatClient
from agent_runtime.errors import AgentBusy
from agent_runtime.events import RunStatus
from agent_runtime.limits import Limits
from agent_runtime.loop import Agent
from agent_runtime.resume import recover
from agent_runtime.runstore import MemoryRunStore
from agent_runtime.subagents import delegate_tool
from agent_runtime.tools.registry import ToolDefinitionError, ToolRegistry, tool
from tests.agent.scripted_endpoint import says, serve
from tests.agent.scripted_model import ScriptedModel, Seen, turn

TASK = '{"task": "part"}'


@tool
async def look() -> str:
    """Looks."""
    return "seen"


async def test_delegated_tasks_run_beside_each_other_on_the_parents_prefix() -> None:
    together = asyncio.Barrier(2)

    async def plays(seen: Seen) -> AssistantTurn:
        last = str(seen.messages[-1].content)
        if last.startswith("part"):
            await together.wait()
            return turn(f"answer to {last}")
        if last == "go":
            return turn("", ("look", "{}"), reasoning="first")
        if len(seen.messages) == 4:
            return turn("", ("delegate", '{"task": "part 1"}'), ("delegate", '{"task": "part 2"}'))
        return turn("done")

    model = ScriptedModel([plays])
    agent = Agent(model, ToolRegistry([look, delegate_tool()]), "be good")
    result = await agent.run("go")
    parts = [seen for seen in model.seen if str(seen.messages[-1].content).startswith("part")]
    assert result.text == "done" and len(parts) == 2
    prefix = model.seen[1].messages
    assert all(seen.messages[:-1] == prefix and seen.tools == model.seen[1].tools for seen in parts)
    assert [m.content for m in agent.conversation.messages[-3:-1]] == ["answer to part 1", "answer to part 2"]
    assert "part 1" not in [str(m.content) for m in agent.conversation.messages], "the parent sees the results only"


async def test_a_sub_agent_cannot_delegate_further_and_its_failure_is_read_by_the_parent() -> None:
    def plays(seen: Seen) -> AssistantTurn:
        if seen.messages[-1].role == "tool":
            return turn(str(seen.messages[-1].content))
        return turn("", ("delegate", '{"task": "part"}'))

    model = ScriptedModel([plays])
    result = await Agent(model, ToolRegistry([delegate_tool()])).run("go")
    assert "cannot be delegated further" in result.text

    def loops(seen: Seen) -> AssistantTurn:
        return turn("", ("look" if len(seen.messages) > 1 else "delegate", "{}" if len(seen.messages) > 1 else TASK))

    agent = Agent(
        ScriptedModel([loops]), ToolRegistry([look, delegate_tool(Limits(max_steps=2))]), limits=Limits(max_steps=1)
    )
    result = await agent.run("go")
    assert "ended without an answer (max_steps)" in result.steps[0].tools[0].result.model


async def test_a_fork_and_its_parent_do_not_see_each_other() -> None:
    store = MemoryRunStore()
    agent = Agent(ScriptedModel([turn("one"), turn("two"), turn("three")]), ToolRegistry(), "s")
    await agent.run("a")
    fork = agent.fork(store=store)
    await fork.run("b")
    await agent.run("c")
    assert [m.content for m in fork.conversation.messages] == ["s", "a", "one", "b", "two"]
    assert [m.content for m in agent.conversation.messages] == ["s", "a", "one", "c", "three"]
    assert recover(store.entries()).conversation.messages == fork.conversation.messages


async def test_case19_b55_tools_that_come_later_are_declared_at_the_end() -> None:
    """sglang#39895: K3's dynamic tools, a system message with tools and without content. No earlier byte moves."""

    @tool
    async def later() -> str:
        """Comes later.

        Ünïcode: 天気.
        """
        return "used"

    with serve(says("one"), says("two")) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            agent = Agent(client, ToolRegistry([look]), "s")
            await agent.run("a")
            agent.add_tools([later])
            await agent.run("b")
    first, second = endpoint.requests
    assert second["tools"] == first["tools"] and len(first["tools"]) == 1
    assert json.dumps(second["messages"][:2]) == json.dumps(first["messages"])
    assert second["messages"][3] == {"role": "system", "tools": [later.schema]}
    assert Conversation.load(agent.conversation.dump()).messages == agent.conversation.messages


async def test_added_tools_can_be_called_and_survive_a_compression_and_a_resume() -> None:
    @tool
    async def later() -> str:
        """Comes later."""
        return "used"

    store = MemoryRunStore()
    model = ScriptedModel([turn("one"), turn("SUMMARY"), turn("", ("later", "{}")), turn("done")])
    agent = Agent(model, ToolRegistry([look]), "s", store=store)
    await agent.run("a")
    agent.add_tools([later])
    await agent.compress()
    assert [m.role for m in agent.conversation.messages] == ["system", "system", "user", "user"]
    assert agent.conversation.messages[1].tools == (later.schema,)
    result = await agent.run("b")
    assert result.steps[0].tools[0].result.model == "used"
    resumed = Agent.resume(ScriptedModel([turn("x")]), ToolRegistry([look, later]), store)
    assert resumed.conversation.messages == agent.conversation.messages and len(resumed.tools) == 1


async def test_tools_are_added_between_runs_and_under_new_names_only() -> None:
    agent = Agent(ScriptedModel([turn("x")]), ToolRegistry([look]))
    with pytest.raises(ToolDefinitionError, match="'look' is already registered"):
        agent.add_tools([look])

    @tool
    async def adds() -> str:
        """Adds."""
        agent.add_tools([])
        return ""

    busy = Agent(ScriptedModel([turn("", ("adds", "{}")), turn("x")]), ToolRegistry([adds]))
    agent = busy
    result = await busy.run("go")
    assert AgentBusy.__name__ in result.steps[0].tools[0].result.model
    assert Message(role="system", tools=()) not in busy.conversation.messages


async def test_tokens_of_sub_agents_count_in_the_run_and_its_budget() -> None:
    def plays(seen: Seen) -> AssistantTurn:
        if seen.messages[-1].content == "part":
            return turn("found", usage=Usage(1000, 100, 900))
        return turn("", ("delegate", TASK), usage=Usage(100, 10, 50))

    agent = Agent(ScriptedModel([plays]), ToolRegistry([delegate_tool()]), limits=Limits(token_budget=250))
    result = await agent.run("go")
    assert result.status is RunStatus.TOKEN_BUDGET and len(result.steps) == 1
    assert (result.usage.prompt_tokens, result.usage.cached_tokens, result.usage.completion_tokens) == (1100, 950, 110)
