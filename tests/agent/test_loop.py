"""The loop over a real HTTP endpoint: what is sent, what is run, and what the model reads."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from scripted_agent import add, hangs, run, tool_texts
from scripted_endpoint import Reply, call, calls, says, serve

from agent_runtime.conversation import Conversation, ConversationError
from agent_runtime.engine.openai_chat import ChatClient, ChatTimeouts
from agent_runtime.events import (
    ContentDelta,
    Event,
    RunFinished,
    RunStatus,
    StepFinished,
    StepStarted,
    ToolFinished,
    ToolStarted,
)
from agent_runtime.loop import Agent, Limits
from agent_runtime.repeats import RepeatLimits
from agent_runtime.session import SyncAgent
from agent_runtime.tools.files import file_tools
from agent_runtime.tools.registry import ToolRegistry, tool
from agent_runtime.tools.result import Failure
from agent_runtime.tools.shell import shell_tool


async def test_calls_are_run_and_their_results_lead_to_the_answer() -> None:
    result, endpoint, _ = await run(calls(("add", {"a": 1, "b": 2})), says("It is 3."))
    assert (result.status, result.text) == (RunStatus.COMPLETED, "It is 3.")
    assert endpoint.requests[1]["messages"] == [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "think",
            "tool_calls": [
                {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c0"},
    ]
    first = result.steps[0]
    assert (first.prompt_tokens, first.cached_tokens, first.extend_tokens, first.completion_tokens) == (100, 50, 50, 10)
    assert first.ttft_s is not None and [run.call.name for run in first.tools] == ["add"]
    assert result.steps[1].tools == ()


async def test_every_request_extends_the_one_before_over_several_user_turns() -> None:
    """Byte for byte, as canonical JSON: this is what lets the engine reuse its prefix."""
    script = [
        calls(("add", {"a": 1, "b": 2}), ("nope", {}), ids="x"),
        calls(("add", "{broken"), ids="y"),
        says("first answer"),
        calls(("add", {"a": 5, "b": 5}), ids="z"),
        says("second answer"),
    ]
    with serve(*script) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            agent = Agent(client, ToolRegistry([add]), "be good")
            await agent.run("one")
            await agent.run("two")
    requests = endpoint.requests
    assert len(requests) == 5
    for earlier, later in zip(requests, requests[1:], strict=False):
        known = len(earlier["messages"])
        assert json.dumps(later["messages"][:known]) == json.dumps(earlier["messages"])
        assert json.dumps(later["tools"]) == json.dumps(earlier["tools"])
    assert json.dumps(agent.conversation.wire()[:-1]) == json.dumps(requests[-1]["messages"])
    assert agent.conversation.wire()[-1]["content"] == "second answer"


async def test_parallel_calls_of_one_turn_meet_and_answer_in_order() -> None:
    both, waiting = asyncio.Event(), 0

    @tool
    async def meet(name: str) -> str:
        """Waits for a second caller.

        Args:
            name: Who.
        """
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            both.set()
        await both.wait()
        return name

    _, endpoint, _ = await run(calls(("meet", {"name": "a"}), ("meet", {"name": "b"})), says("done"), tools=[meet])
    assert tool_texts(endpoint) == ["a", "b"]


async def test_b09_failures_are_read_by_the_model_and_the_run_goes_on() -> None:
    script = [
        calls(("ad", {}), ("add", '{"a": 1'), ("add", {"a": 1, "b": "2"}), ("add", {"a": 1, "b": 1})),
        says("done"),
    ]
    result, endpoint, _ = await run(*script)
    unknown, bad_json, invalid, good = tool_texts(endpoint)
    assert unknown.startswith("There is no tool named 'ad'. Did you mean 'add'?")
    assert "not a valid JSON object" in bad_json and "b: Input should be a valid integer" in invalid
    assert good == "2" and result.completed
    assert [run.result.failure for run in result.steps[0].tools] == [
        Failure.UNKNOWN_TOOL,
        Failure.BAD_JSON,
        Failure.INVALID_ARGUMENTS,
        None,
    ]


async def test_b12_a_call_cut_off_at_the_output_limit_is_not_executed_even_when_it_looks_whole() -> None:
    ran: list[str] = []

    @tool
    async def delete(path: str) -> str:
        """Deletes.

        Args:
            path: What.
        """
        ran.append(path)
        return "deleted"

    cut = Reply([call("delete", {"path": "/"}, id="p"), call("delete", '{"path": "/ho', index=1, id="q")], "length")
    result, endpoint, _ = await run(cut, says("sorry"), tools=[delete])
    assert ran == [] and result.completed
    assert all("cut off (finish reason 'length')" in text for text in tool_texts(endpoint))
    assert [run.result.failure for run in result.steps[0].tools] == [Failure.CUT_OFF, Failure.CUT_OFF]
    sent = endpoint.requests[1]["messages"][2]["tool_calls"][1]["function"]["arguments"]
    assert sent == '{"path": "/ho', "the turn goes back as it was"


async def test_a_tool_that_hangs_is_cut_by_its_timeout_and_the_run_goes_on() -> None:
    impatient = tool(name="hangs", timeout_s=0.05)(hangs.function)
    result, endpoint, _ = await run(calls(("hangs", {})), says("done"), tools=[impatient])
    assert result.completed and "stopped after 0.05 s" in tool_texts(endpoint)[0]


async def test_file_and_shell_tools_report_trouble_to_the_model(tmp_path: Path) -> None:
    """Escape, killed child and runaway output in one turn, as the model reads them."""
    script = [
        calls(
            ("read_file", {"path": "../secret"}),
            ("run_command", {"command": "kill -9 $$"}),
            ("run_command", {"command": "yes | head -c 100000"}),
        ),
        says("done"),
    ]
    result, endpoint, _ = await run(*script, tools=[*file_tools(tmp_path), shell_tool(tmp_path)])
    escape, killed, flood = tool_texts(endpoint)
    assert "contains '..'" in escape and killed == "[killed by SIGKILL]"
    assert "[... 70000 bytes omitted ...]" in flood and flood.endswith("[exit code 0]")
    assert result.completed


async def test_repeated_ids_are_replaced_so_that_results_cannot_mix_up() -> None:
    same = Reply([call("add", {"a": 1, "b": 1}, id="n"), call("add", {"a": 2, "b": 2}, index=1, id="n")], "tool_calls")
    _, endpoint, _ = await run(same, same, says("done"))
    messages = endpoint.requests[-1]["messages"]
    made = [c["id"] for m in messages for c in m.get("tool_calls", [])]
    answered = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
    assert len(set(made)) == 4 and made == answered and made[0] == "n"


async def test_events_tell_the_run_in_order() -> None:
    events: list[Event] = []
    result, _, _ = await run(calls(("add", {"a": 1, "b": 2})), says("3"), events=events)
    kinds = [type(event) for event in events if isinstance(event, (StepStarted, ToolStarted, ToolFinished))]
    assert kinds == [StepStarted, ToolStarted, ToolFinished, StepStarted]
    assert ContentDelta("3") in events and events[-1] == RunFinished(result)
    assert [event.record for event in events if isinstance(event, StepFinished)] == list(result.steps)


async def test_a_run_can_be_watched_as_a_stream() -> None:
    with serve(calls(("add", {"a": 1, "b": 2})), says("3")) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            agent = Agent(client, ToolRegistry([add]))
            seen = [event async for event in agent.run_stream("go")]
    last = seen[-1]
    assert isinstance(last, RunFinished) and last.result.text == "3"


async def test_a_turn_without_a_call_stays_in_the_history() -> None:
    with serve(says("first", "R1"), says("second", "R2")) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            agent = Agent(client, ToolRegistry())
            await agent.run("a")
            await agent.run("b")
    assert endpoint.requests[1]["messages"][1] == {
        "role": "assistant",
        "content": "first",
        "reasoning_content": "R1",
    }


async def test_a_saved_conversation_goes_on_and_calls_left_open_by_a_crash_are_answered() -> None:
    with serve(calls(("add", {"a": 1, "b": 2})), says("3"), says("4")) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            agent = Agent(client, ToolRegistry([add]), "be good")
            await agent.run("go")
            crashed = Conversation(agent.conversation.messages[:3])
            resumed = Agent(client, ToolRegistry([add]), conversation=Conversation.load(crashed.dump()))
            await resumed.run("and now?")
    assert json.dumps(endpoint.requests[2]["messages"][:3]) == json.dumps(endpoint.requests[1]["messages"][:3])
    assert tool_texts(endpoint)[0].startswith("Interrupted")


async def test_misuse_is_refused_with_a_reason() -> None:
    with serve(Reply([{"content": "x"}], None, end="hang")) as endpoint:
        async with ChatClient(endpoint.base_url, timeouts=ChatTimeouts(connect_tries=1)) as client:
            agent = Agent(client, ToolRegistry())
            with pytest.raises(ConversationError, match="blank user message"):
                await agent.run("  ")
            begun = asyncio.Event()
            task = asyncio.create_task(agent.run("go", on_event=lambda _: begun.set()))
            await begun.wait()
            with pytest.raises(RuntimeError, match="already running"):
                await agent.run("me too")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(ValueError, match="either a system text"):
                Agent(client, ToolRegistry(), "system", conversation=Conversation())
    with pytest.raises(ValueError, match="max_steps=0"):
        Limits(max_steps=0)
    with pytest.raises(ValueError, match="must rise"):
        RepeatLimits(3, 2, 6)


def test_the_sync_wrapper_runs_several_turns_on_one_connection() -> None:
    with serve(calls(("add", {"a": 1, "b": 2})), says("3"), says("bye")) as endpoint:
        client = ChatClient(endpoint.base_url)
        with SyncAgent(Agent(client, ToolRegistry([add])), client) as agent:
            assert agent.run("go").text == "3"
            assert agent.run("thanks").text == "bye"


async def test_case30_many_sessions_at_once_do_not_see_each_other() -> None:
    answered: dict[int, Any] = {}

    async def session(number: int, client: ChatClient) -> None:
        @tool
        async def mine() -> int:
            """My number."""
            return number

        agent = Agent(client, ToolRegistry([mine]), f"session {number}", limits=Limits(max_steps=2))
        await agent.run("go")
        answered[number] = [m["content"] for m in agent.conversation.wire() if m["role"] in ("system", "tool")]

    with serve(calls(("mine", {}))) as endpoint:
        async with ChatClient(endpoint.base_url) as client, asyncio.TaskGroup() as group:
            for number in range(32):
                group.create_task(session(number, client))
    assert answered == {n: [f"session {n}", str(n), str(n)] for n in range(32)}
