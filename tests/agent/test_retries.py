"""Answers that broke off or cannot be used: asked for again in the same bytes, within a bound, never called done."""

import asyncio
from typing import Any

import pytest

from agent_runtime.conversation import AssistantTurn, ContentDelta, Usage
from agent_runtime.engine.chat_errors import ChatProtocolError, EndpointFailed, StreamBroken
from agent_runtime.engine.openai_chat import ChatClient, ChatTimeouts
from agent_runtime.events import Event, RunResult, RunStatus, StepRetried
from agent_runtime.faults import Fault, find_fault
from agent_runtime.limits import Limits, Retries
from agent_runtime.loop import Agent
from agent_runtime.tools.registry import ToolRegistry, tool
from tests.agent.scripted_endpoint import Reply, calls, says, serve
from tests.agent.scripted_model import Line, ScriptedModel, turn

QUICK = Retries(backoff_s=0.0)
SWALLOWED = (
    'I should read it.<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|><|open|>argument key="city" '
    'type="string"<|sep|>Oslo<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
)


@tool
async def look() -> str:
    """Looks."""
    return "seen"


async def ran(
    *script: Line, retries: Retries = QUICK, events: list[Event] | None = None, task: str = "go"
) -> tuple[RunResult, ScriptedModel, Agent]:
    model = ScriptedModel(list(script))
    agent = Agent(model, ToolRegistry([look]), limits=Limits(retries=retries))
    return await agent.run(task, on_event=[].append if events is None else events.append), model, agent


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (turn("", reasoning="The answer is 4."), Fault.EMPTY),
        (turn(" \n", reasoning=""), Fault.EMPTY),
        (turn("", reasoning=SWALLOWED), Fault.SWALLOWED_CALL),
        (turn(SWALLOWED), Fault.SWALLOWED_CALL),
        (turn("", reasoning='<open>tools <open>call tool="look" index="1"'), Fault.SWALLOWED_CALL),
        (turn("Done.<|close|>message<|sep|>"), Fault.LEAKED_MARKERS),
        (turn("The user is asking for a poem. I should", reasoning=""), Fault.THINKING_AS_TEXT),
        (turn("<think>hm</think>4", reasoning=""), Fault.THINKING_AS_TEXT),
        (turn("4"), None),
        (turn("The user is asking for a poem, I wrote.", reasoning="hm"), None),
        (turn('K3 writes `<|open|>` and then call tool="other"', reasoning=""), Fault.LEAKED_MARKERS),
        (turn("", ("look", "{}"), reasoning=SWALLOWED), None),
        (turn("", finish="length"), None),
    ],
)
def test_what_is_wrong_with_an_answer_is_recognised(answer: AssistantTurn, fault: Fault | None) -> None:
    assert find_fault(answer, ("look",)) is fault


async def test_case09_an_answer_that_landed_in_the_thinking_is_asked_for_once_more() -> None:
    """sglang#33995: the whole answer in reasoning, no content, finish stop: 127 of 700."""
    result, model, agent = await ran(turn("", reasoning="The answer is 4."), turn("4"))
    assert result.text == "4" and result.steps[0].attempts == 2 and result.steps[0].faults == ("empty",)
    assert model.seen[0] == model.seen[1], "in the same bytes"
    assert [m.content for m in agent.conversation.messages] == ["go", "4"]
    discarded = [e for e in agent.history.store.entries() if e["kind"] == "discarded"]
    assert discarded[0]["message"]["reasoning_content"] == "The answer is 4.", "the log still has it"


async def test_case09_an_answer_that_stays_empty_is_never_returned_as_success() -> None:
    result, model, agent = await ran(turn("", reasoning="The answer is 4."))
    assert result.status is RunStatus.EMPTY_ANSWER and not result.completed and len(model.seen) == 2
    assert agent.conversation.messages[-1].reasoning == "The answer is 4.", "what came stays in the history"


async def test_case10_a_cut_inside_thinking_is_truncated_and_not_visible_text() -> None:
    """vllm#50258: thinking cut at the limit was returned as content."""
    result, model, agent = await ran(turn("", reasoning="half a thou", finish="length"))
    assert result.status is RunStatus.TRUNCATED and result.text == "" and len(model.seen) == 1
    assert agent.conversation.messages[-1].content == "" and agent.conversation.messages[-1].reasoning == "half a thou"


@pytest.mark.parametrize("where", ["reasoning", "content"])
async def test_case11_b15_a_call_swallowed_by_the_thinking_is_asked_for_again(where: str) -> None:
    """vllm#53246: five percent of tool turns lost their call, and the agent stalled."""
    lost = turn(SWALLOWED) if where == "content" else turn("", reasoning=SWALLOWED)
    result, model, agent = await ran(lost, turn("", ("look", "{}")), turn("done"))
    assert result.completed and result.steps[0].faults == ("swallowed_call",)
    assert [run.call.name for run in result.steps[0].tools] == ["look"] and len(model.seen) == 3
    assert SWALLOWED not in str(agent.conversation.wire())
    failed, _, agent = await ran(lost)
    assert failed.status is RunStatus.MALFORMED_ANSWER, "no silent `tool_calls: []`"


async def test_case12_leaked_markers_are_asked_for_again_and_then_said() -> None:
    """vllm#54273: the end-of-message marker came as text."""
    leaked = turn("Done.<|close|>message<|sep|>")
    assert (await ran(leaked, turn("Done.")))[0].text == "Done."
    result, _, _ = await ran(leaked)
    assert result.completed and result.steps[0].faults == ("leaked_markers",) * 2


async def test_case08_case29_b21_thinking_in_the_text_is_asked_for_again_and_then_said() -> None:
    """cline#12385, Kimi-K3#45: thought came as content, now and then."""
    thought = turn("The user is asking for a poem. I should write one.", reasoning="")
    result, model, _ = await ran(thought, turn("A poem."))
    assert result.text == "A poem." and len(model.seen) == 2
    result, _, _ = await ran(thought)
    assert result.steps[0].faults == ("thinking_as_text",) * 2


async def test_case29_an_answer_that_cannot_be_parsed_is_asked_for_once_more() -> None:
    result, model, _ = await ran(ChatProtocolError("no finish reason"), turn("4"))
    assert result.text == "4" and len(model.seen) == 2
    with pytest.raises(ChatProtocolError):
        await ran(ChatProtocolError("no finish reason"))


async def test_case13_a_call_cut_at_the_limit_is_not_executed() -> None:
    """sglang#34881: an explicit error item, and the model may try again."""
    cut = turn("", ("look", '{"a": '), finish="length")
    result, model, _ = await ran(cut, turn("ok"))
    assert result.completed and "cut off (finish reason 'length')" in str(model.seen[1].messages[-1].content)


async def test_case31_a_turn_without_a_call_stays_in_the_next_request() -> None:
    """mini-swe-agent throws such a turn away before it asks again."""
    model = ScriptedModel([turn("first", reasoning="R1"), turn("second")])
    agent = Agent(model, ToolRegistry())
    await agent.run("one")
    await agent.run("no tool calls found")
    assert model.seen[1].messages[1].reasoning == "R1" and model.seen[1].messages[1].content == "first"


async def test_b54_a_stream_that_goes_silent_is_bounded_saved_and_asked_again() -> None:
    """kimi-code#1050: no [DONE], the client waits for ever, and the next message replaces the turn."""
    silent = Reply([{"reasoning_content": "hm"}, {"content": "half"}], None, end="hang")
    events: list[Event] = []
    with serve(silent, says("whole")) as endpoint:
        async with ChatClient(endpoint.base_url, timeouts=ChatTimeouts(idle_s=0.2)) as client:
            agent = Agent(client, ToolRegistry(), limits=Limits(retries=QUICK))
            assert (await agent.run("go", on_event=events.append)).text == "whole"
    assert endpoint.requests[0]["messages"] == endpoint.requests[1]["messages"]
    partial = [e for e in agent.history.store.entries() if e["kind"] == "partial"]
    assert [(e["reasoning"], e["content"]) for e in partial] == [("hm", "half")]
    assert [e.attempt for e in events if isinstance(e, StepRetried)] == [1]


async def test_b54_when_it_stays_silent_the_partial_turn_is_kept_with_a_mark() -> None:
    silent = Reply([{"content": "half"}], None, end="hang")
    with serve(silent) as endpoint:
        async with ChatClient(endpoint.base_url, timeouts=ChatTimeouts(idle_s=0.1)) as client:
            agent = Agent(client, ToolRegistry(), limits=Limits(retries=QUICK))
            with pytest.raises(StreamBroken, match=r"no data for 0\.1 s"):
                await agent.run("go")
    assert len(endpoint.requests) == 3
    assert agent.conversation.wire()[-1]["content"] == "half\n\n[interrupted]"


async def test_b54_a_stream_that_ends_without_done_after_the_finish_reason_is_whole() -> None:
    with serve(Reply([{"content": "whole"}], "stop", end="close")) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            assert (await Agent(client, ToolRegistry()).run("go")).text == "whole"
    assert len(endpoint.requests) == 1


async def test_server_errors_are_retried_with_growing_pauses_and_then_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    real = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    down = EndpointFailed("503", status=503)
    assert (await ran(down, down, turn("up"), retries=Retries(failures=2, backoff_s=0.5)))[0].text == "up"
    assert pauses == [0.5, 1.0]
    with pytest.raises(EndpointFailed):
        await ran(down, retries=Retries(failures=2, backoff_s=0.5))
    pauses.clear()
    busy = EndpointFailed("429", status=429, retry_after_s=3.0)
    assert (await ran(busy, turn("up"), retries=Retries(backoff_s=0.5)))[0].text == "up" and pauses == [3.0]
    assert Retries().pause_s(1, 1000.0) == 60.0, "nobody waits for a quarter of an hour"


async def test_tokens_of_answers_that_are_not_kept_count_for_the_budget() -> None:
    empty = turn("", reasoning="x", usage=Usage(100, 10, 60))
    model = ScriptedModel([empty, turn("", ("look", "{}"), usage=Usage(100, 10, 90)), turn("done")])
    agent = Agent(model, ToolRegistry([look]), limits=Limits(retries=QUICK, token_budget=70))
    result = await agent.run("go")
    assert result.steps[0].wasted_tokens == 50 and result.steps[0].spent_tokens == 70
    assert result.status is RunStatus.TOKEN_BUDGET


async def test_b55_a_turn_of_wrong_calls_is_dropped_from_the_retry_when_asked() -> None:
    """upgrade-agent-plugins#30: with 90 tools K3 called a neighbour, and each correction made it likelier."""
    wrong = turn("", ("lok", "{}"), ("look", '{"x": 1}'))
    result, model, agent = await ran(wrong, turn("", ("look", "{}")), turn("done"), retries=Retries(misfires=1))
    assert result.completed and result.steps[0].faults == ("misfired",)
    assert model.seen[0] == model.seen[1] and "lok" not in str(agent.conversation.wire())
    result, model, _ = await ran(wrong, turn("done"), retries=Retries(misfires=0))
    assert "There is no tool named 'lok'" in str(model.seen[1].messages), "by default the model reads what was wrong"


async def test_case28_the_last_finish_reason_counts_once() -> None:
    """Vibe-Trading#39: reasons of several chunks were joined to "stopstop"."""
    choice = '{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}'
    twice = f'data: {{"id":"x","object":"chat.completion.chunk","created":0,"model":"m","choices":[{choice}]}}\n\n'
    with serve(Reply(raw=twice, finish="stop")) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            result = await Agent(client, ToolRegistry()).run("go")
    assert result.steps[0].finish_reason == "stop"


async def test_case15_ids_that_repeat_over_turns_do_not_freeze_the_agent() -> None:
    """sglang#33343: `exec:80` twice after a truncated history, frozen for 60 turns. Also over a compression."""
    model = ScriptedModel([turn("", ("look", "{}")), turn("SUMMARY"), turn("", ("look", "{}")), turn("done")])
    agent = Agent(model, ToolRegistry([look]), limits=Limits(max_steps=1))
    await agent.run("go")
    await agent.compress()
    await agent.run("go on")
    ids = [e["call"] for e in agent.history.store.entries() if e["kind"] == "result"]
    assert ids[0] == "c0" and len(set(ids)) == 2


async def test_case14_b03_a_long_argument_may_take_its_time_while_the_line_is_held() -> None:
    """vllm#50604: 200 KB of arguments after minutes of silence, with keep-alive comments only."""
    long = "x" * 200_000
    body: Any = calls(("say", {"text": long}))
    slow = Reply(body.deltas, body.finish, body.usage, comments=6)

    @tool
    async def say(text: str) -> str:
        """Says.

        Args:
            text: What.
        """
        return str(len(text))

    with serve(slow, says("done")) as endpoint:
        async with ChatClient(endpoint.base_url, timeouts=ChatTimeouts(idle_s=0.25)) as client:
            result = await Agent(client, ToolRegistry([say])).run("go")
    assert result.completed and result.steps[0].tools[0].result.model == "200000"


async def test_deltas_of_an_answer_that_is_not_kept_are_followed_by_a_retry_event() -> None:
    events: list[Event] = []
    await ran(turn("Done.<|sep|>"), turn("Done."), events=events)
    kinds = [
        e.text if isinstance(e, ContentDelta) else e.reason
        for e in events
        if isinstance(e, (ContentDelta, StepRetried))
    ]
    assert kinds == ["Done.<|sep|>", "leaked_markers", "Done."]


@pytest.mark.parametrize("name", ["failures", "unusable", "misfires", "backoff_s"])
def test_retries_cannot_be_negative(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=-1"):
        Retries(**{name: -1})


async def test_b52_a_turn_of_thinking_alone_goes_back_with_its_thinking() -> None:
    """OmniRoute#9496: such turns were dropped by gateways, and the next prompt had an empty think channel."""
    with serve(Reply([{"reasoning_content": "R1"}]), says("ok")) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            agent = Agent(client, ToolRegistry(), limits=Limits(retries=Retries(unusable=0)))
            assert (await agent.run("a")).status is RunStatus.EMPTY_ANSWER
            await agent.run("b")
    assert endpoint.requests[1]["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "R1"},
        {"role": "user", "content": "b"},
    ]
