"""How a run ends: limits, cancellation, loops of calls, broken streams, answers that are none."""

import asyncio

import pytest
from scripted_agent import add, hangs, run, tool_texts
from scripted_endpoint import Reply, calls, says, serve

from agent_runtime.engine.chat_errors import EndpointFailed, StreamBroken
from agent_runtime.engine.openai_chat import ChatClient
from agent_runtime.events import (
    ContentDelta,
    ReasoningDelta,
    RunStatus,
    ToolStarted,
)
from agent_runtime.loop import Agent, Limits, Retries
from agent_runtime.repeats import RepeatLimits
from agent_runtime.tools.registry import ToolRegistry, tool


async def test_leaving_the_stream_early_cancels_the_run() -> None:
    with serve(calls(("hangs", {}))) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            agent = Agent(client, ToolRegistry([hangs]))
            stream = agent.run_stream("go")
            async for event in stream:
                if isinstance(event, ToolStarted):
                    break
            await stream.aclose()
    assert agent.conversation.wire()[-1]["content"].startswith("Interrupted")


async def test_a_failure_of_the_endpoint_reaches_the_reader_of_the_stream() -> None:
    with serve(Reply(status=500, body={"error": {"message": "down"}})) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            with pytest.raises(EndpointFailed, match="down"):
                _ = [event async for event in Agent(client, ToolRegistry()).run_stream("go")]


async def test_cancelling_in_the_middle_of_a_tool_leaves_every_call_answered() -> None:
    running = asyncio.Event()

    @tool
    async def waits() -> str:
        """Never returns."""
        running.set()
        await asyncio.Event().wait()
        return ""

    with serve(calls(("add", {"a": 1, "b": 2}), ("waits", {})), says("carry on")) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            agent = Agent(client, ToolRegistry([add, waits]))
            task = asyncio.create_task(agent.run("go"))
            await running.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert agent.conversation.open_calls == ()
            result = await agent.run("what happened?")
    assert result.text == "carry on"
    done, interrupted = tool_texts(endpoint)
    assert done == "3" and interrupted.startswith("Interrupted before there was a result.")


async def test_text_of_an_answer_that_is_cancelled_stays_with_a_mark() -> None:
    half = Reply([{"reasoning_content": "hm"}, {"content": "half"}], None, end="hang")
    with serve(half, says("whole")) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            agent = Agent(client, ToolRegistry())
            stream = agent.run_stream("go")
            async for event in stream:
                if isinstance(event, ContentDelta):
                    break
            await stream.aclose()
            assert (await agent.run("again")).text == "whole"
    assert endpoint.requests[1]["messages"][1:] == [
        {"role": "assistant", "content": "half\n\n[interrupted]", "reasoning_content": "hm"},
        {"role": "user", "content": "again"},
    ]


async def test_thinking_that_was_cancelled_is_only_in_the_log() -> None:
    with serve(Reply([{"reasoning_content": "hm"}], None, end="hang")) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            agent = Agent(client, ToolRegistry())
            stream = agent.run_stream("go")
            async for event in stream:
                if isinstance(event, ReasoningDelta):
                    break
            await stream.aclose()
    assert [m.role for m in agent.conversation.messages] == ["user"]
    assert [e["reasoning"] for e in agent.history.store.entries() if e["kind"] == "partial"] == ["hm"]


async def test_a_broken_stream_is_an_error_and_the_agent_can_go_on() -> None:
    with serve(Reply([{"content": "half"}], None), says("whole")) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            agent = Agent(client, ToolRegistry(), limits=Limits(retries=Retries(failures=0)))
            with pytest.raises(StreamBroken):
                await agent.run("go")
            assert (await agent.run("again")).text == "whole"


async def test_the_step_limit_ends_a_run_that_does_not() -> None:
    script = [calls(("add", {"a": n, "b": n}), ids=f"s{n}") for n in range(5)]
    result, endpoint, _ = await run(*script, limits=Limits(max_steps=3))
    assert result.status is RunStatus.MAX_STEPS
    assert len(result.steps) == len(endpoint.requests) == 3


async def test_the_token_budget_counts_computed_tokens() -> None:
    script = [calls(("add", {"a": n, "b": n}), ids=f"s{n}") for n in range(5)]
    result, _, _ = await run(*script, limits=Limits(token_budget=120))
    assert result.status is RunStatus.TOKEN_BUDGET
    assert [step.spent_tokens for step in result.steps] == [60, 60]


async def test_the_time_budget_ends_a_run_in_the_middle_of_a_tool() -> None:
    result, _, agent = await run(calls(("hangs", {})), tools=[hangs], limits=Limits(time_budget_s=3))
    assert result.status is RunStatus.TIME_BUDGET
    assert agent.conversation.wire()[-1]["content"].startswith("Interrupted")


async def test_identical_calls_are_reminded_then_refused_then_ended() -> None:
    ran: list[int] = []

    @tool
    async def look() -> str:
        """Looks."""
        ran.append(1)
        return "nothing new"

    result, endpoint, _ = await run(calls(("look", {})), tools=[look], limits=Limits(max_steps=50))
    assert result.status is RunStatus.REPEATED_CALLS and len(result.steps) == 6
    assert len(ran) == 3, "refused calls are not run"
    texts = [run.result.model for step in result.steps for run in step.tools]
    assert texts[:2] == ["nothing new", "nothing new"] and "same result 3 times" in texts[2]
    assert texts[3].startswith("Not run: this exact call was made 4 times") and "nothing new" in texts[3]
    assert tool_texts(endpoint) == texts[:-1]


async def test_two_calls_taking_turns_are_a_loop_too() -> None:
    script = [calls(("add", {"a": n % 2, "b": 0}), ids=f"s{n}") for n in range(20)]
    result, _, _ = await run(*script, limits=Limits(repeats=RepeatLimits(2, 3, 3)))
    assert result.status is RunStatus.REPEATED_CALLS and len(result.steps) == 5


async def test_a_conversation_that_no_longer_fits_ends_the_run_and_not_the_program() -> None:
    full = Reply(status=400, body={"error": {"message": "too long", "code": "context_length_exceeded"}})
    result, _, _ = await run(calls(("add", {"a": 1, "b": 1})), full)
    assert result.status is RunStatus.CONTEXT_FULL and len(result.steps) == 1


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (Reply([{"reasoning_content": "only thinking"}]), RunStatus.EMPTY_ANSWER),
        (Reply([{"content": " \n"}]), RunStatus.EMPTY_ANSWER),
        (Reply(), RunStatus.EMPTY_ANSWER),
        (Reply([{"content": "cut in the mid"}], "length"), RunStatus.TRUNCATED),
        (Reply([{"content": "withheld"}], "content_filter"), RunStatus.TRUNCATED),
    ],
    ids=["thinking-only", "blank", "nothing", "length", "filter"],
)
async def test_what_is_no_finished_answer_is_never_called_one(reply: Reply, status: RunStatus) -> None:
    result, _, agent = await run(reply)
    assert result.status is status and not result.completed
    assert all(m["content"] or m.get("reasoning_content") for m in agent.conversation.wire())
