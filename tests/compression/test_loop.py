"""An agent that compresses on its way: what its runs, limits and resumes make of it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.compression.count import EncoderMeter
from agent_runtime.compression.trigger import CompressionSettings
from agent_runtime.conversation import AssistantTurn, ConversationError, Message, Usage
from agent_runtime.engine.chat_errors import ContextOverflow, StreamBroken
from agent_runtime.engine.openai_chat import ChatClient
from agent_runtime.events import CompressionFinished, CompressionStarted, Event, RunStatus, StepStarted
from agent_runtime.limits import Limits, Retries
from agent_runtime.loop import Agent, AgentOptions
from agent_runtime.replay import replay
from agent_runtime.resume import recover
from agent_runtime.runstore import MemoryRunStore
from agent_runtime.tools.plan import Plan
from agent_runtime.tools.recovery import recovery_tools
from agent_runtime.tools.registry import ToolRegistry, tool
from k3_sglang.chat.encode import encode_ids
from k3_sglang.chat.types import ChatRequest
from k3_sglang.tiny.checkpoint import ensure
from tests.agent.scripted_endpoint import calls, says, serve
from tests.agent.scripted_model import Line, ScriptedModel, Seen, is_summary, turn
from tests.gateway.vocabulary import byte_tokenizer

TOKENIZER = byte_tokenizer()


@tool
async def look(n: int = 0) -> str:
    """Looks.

    Args:
        n: Where.
    """
    return "nothing new"


def options(trigger: int, window: int | None = None, **more: Any) -> AgentOptions:
    settings = CompressionSettings(trigger, window, backoff_s=0.0, summary_tokens=2000, **more)
    return AgentOptions(settings)


def request(seen: Seen, last: int | None = None) -> ChatRequest:
    return ChatRequest(seen.messages[:last], tuple(dict(tool) for tool in seen.tools))


def sized(messages: Sequence[Message], tools: Sequence[Any]) -> int:
    return len(encode_ids(ChatRequest(tuple(messages), tuple(dict(tool) for tool in tools)), TOKENIZER))


def counted(seen: Seen, answer: AssistantTurn) -> Usage:
    """What an engine would report: it ends where the encoder begins the next message."""
    prompt = sized(seen.messages, seen.tools)
    after = replace(request(seen), messages=(*seen.messages, answer.message()), add_generation_prompt=False)
    return Usage(prompt, len(encode_ids(after, TOKENIZER)) - prompt, prompt // 2)


def overflow() -> ContextOverflow:
    return ContextOverflow("too long", status=400, code="context_length_exceeded", param="messages")


def compressions(events: list[Event]) -> list[CompressionFinished]:
    return [event for event in events if isinstance(event, CompressionFinished)]


async def test_b48_growth_while_summarising_is_merged_and_one_call_is_enough() -> None:
    """kimi-code#2720, case 26: 24 compactions begun, 21 cancelled because the loop had gone on, 160K tokens each."""
    model = ScriptedModel([turn("", ("look", "{}")), turn("done")])
    agent = Agent(model, ToolRegistry([look]), "s", options=options(10**6))
    await agent.run("go")

    def meanwhile(seen: Seen) -> AssistantTurn:
        agent.history.append(Message(role="user", content="one more thing"))
        return turn("SUMMARY")

    model.script = [meanwhile]
    finished = await agent.compress()
    assert finished.outcome == "compressed" and finished.calls == 1
    assert agent.conversation.messages[-1].content == "one more thing"


async def test_b48_a_compression_that_fails_does_not_end_the_turn() -> None:
    events: list[Event] = []
    model = ScriptedModel([turn("", ("look", "{}"), usage=Usage(500, 10, 0)), *[StreamBroken("x")] * 5, turn("done")])
    agent = Agent(model, ToolRegistry([look]), "s", options=options(400))
    result = await agent.run("go", on_event=events.append)
    assert result.text == "done" and len(model.summaries) == 5
    assert [c.outcome for c in compressions(events)] == ["failed"]


async def test_b48_failing_compressions_are_bounded_over_a_long_run() -> None:
    """Three in a row, five calls each, whatever the history does."""

    def plays(seen: Seen) -> AssistantTurn | Exception:
        if is_summary(seen):
            return StreamBroken("x")
        size = 100 * len(seen.messages)
        return turn("", ("look", f'{{"n": {size}}}'), usage=Usage(size, 1, 0))

    model = ScriptedModel([plays])
    agent = Agent(model, ToolRegistry([look]), "s", limits=Limits(max_steps=40), options=options(400))
    result = await agent.run("go")
    assert result.status is RunStatus.MAX_STEPS and len(model.steps) == 40 and len(model.summaries) == 15


async def test_case27_system_and_tools_above_the_trigger_are_said_once_with_sizes() -> None:
    """kimi-code#794, kilocode#9763: "still exceeds after 3 attempts", and again at every step."""
    events: list[Event] = []
    model = ScriptedModel([turn("done")])
    meter = EncoderMeter(TOKENIZER)
    agent = Agent(model, ToolRegistry([look]), "s" * 500, options=options(300), meter=meter)
    result = await agent.run("go", on_event=events.append)
    (told,) = compressions(events)
    assert result.completed and told.outcome == "nothing" and model.summaries == []
    size = sized([Message(role="system", content="s" * 500), Message(role="user", content="go")], agent.tools)
    assert f"next prompt {size} tokens" in told.reason and "trigger 300" in told.reason


async def test_case27_a_compression_that_stays_above_the_trigger_is_not_repeated_at_once() -> None:
    def plays(seen: Seen) -> AssistantTurn:
        if is_summary(seen):
            return turn("SUMMARY")
        return turn("", ("look", f'{{"n": {len(model.seen)}}}'))

    model = ScriptedModel([plays], count=counted)
    meter = EncoderMeter(TOKENIZER)
    agent = Agent(
        model, ToolRegistry([look]), "s" * 2000, limits=Limits(max_steps=20), options=options(2000), meter=meter
    )
    result = await agent.run("go")
    assert result.status is RunStatus.MAX_STEPS
    assert 1 <= len(model.summaries) <= 20 * 300 // 100, "each one waits until the history has grown by a 20th"
    for earlier, later in zip(model.seen, model.seen[1:], strict=False):
        assert not (is_summary(earlier) and is_summary(later)), "never two in a row"


async def test_b50_identical_calls_are_counted_over_compressions() -> None:
    """kimi-code#3214: ninety identical reads between 203K and 374K tokens, over several compactions."""

    def plays(seen: Seen) -> AssistantTurn:
        usage = Usage(100 * len(seen.messages), 1, 0)
        return turn("SUMMARY") if is_summary(seen) else turn("", ("look", '{"n": 1}'), usage=usage)

    model = ScriptedModel([plays])
    agent = Agent(model, ToolRegistry([look]), "s", options=options(400))
    result = await agent.run("go")
    assert result.status is RunStatus.REPEATED_CALLS and len(result.steps) == 6
    assert len(model.summaries) >= 2, "the history was compressed in between"
    texts = [run.result.model for step in result.steps for run in step.tools]
    assert "same result 3 times" in texts[2] and texts[3].startswith("Not run") and "nothing new" in texts[3]


async def test_b50_an_empty_user_message_is_never_sent() -> None:
    model = ScriptedModel([turn("done")])
    agent = Agent(model, ToolRegistry(), "s")
    with pytest.raises(ConversationError, match="blank user message"):
        await agent.run("\n")
    assert model.seen == []


async def test_b53_the_first_prompt_after_a_compression_begins_with_the_same_system_text_and_tools() -> None:
    """kimi-code#3357: 0 cached tokens after a compaction. What is kept is byte-identical, so its prefix is cached."""
    script: list[Line] = [turn("", ("look", "{}"), usage=Usage(500, 10, 0)), turn("SUMMARY"), turn("done")]
    model = ScriptedModel(script)
    await Agent(model, ToolRegistry([look]), "system text", options=options(400)).run("task")
    before, summary, after = (encode_ids(request(seen), TOKENIZER) for seen in model.seen)
    head = encode_ids(replace(request(model.seen[0]), add_generation_prompt=False), TOKENIZER)
    assert after[: len(head)] == before[: len(head)] == summary[: len(head)], "system, tools and the task stay"
    history = encode_ids(replace(request(model.seen[1], last=-1), add_generation_prompt=False), TOKENIZER)
    assert summary[: len(history)] == history, "the summary is asked for behind all of the history"


async def test_b53_cached_tokens_of_the_summary_call_are_reported() -> None:
    events: list[Event] = []
    long = calls(("look", {}))
    script = [long, says("SUMMARY"), says("done")]
    with serve(*script) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            agent = Agent(client, ToolRegistry([look]), "s", options=options(110))
            result = await agent.run("go", on_event=events.append)
    (done,) = compressions(events)
    assert [(u.prompt_tokens, u.cached_tokens) for u in done.summary_usage] == [(100, 50)]
    assert result.usage.prompt_tokens == 300 and result.usage.cached_tokens == 150, "the summary counts in the run"
    first, summary, after = (request["messages"] for request in endpoint.requests)
    assert json.dumps(summary[: len(first)]) == json.dumps(first)
    assert json.dumps(after[: len(first)]) == json.dumps(first), "system and task"
    assert endpoint.requests[1]["tools"] == endpoint.requests[0]["tools"]
    assert endpoint.requests[1]["tool_choice"] == "none" and "tool_choice" not in endpoint.requests[2]


async def test_a_full_window_is_compressed_and_the_step_made_again() -> None:
    events: list[Event] = []
    model = ScriptedModel([turn("", ("look", "{}")), overflow(), turn("SUMMARY"), turn("done")])
    result = await Agent(model, ToolRegistry([look]), "s").run("go", on_event=events.append)
    assert result.text == "done" and [type(e) for e in events].count(CompressionStarted) == 1


async def test_a_window_that_stays_full_ends_the_run_after_three_compressions() -> None:
    def plays(seen: Seen) -> AssistantTurn | Exception:
        if is_summary(seen):
            return turn("SUMMARY")
        return overflow() if seen.messages[-1].role == "tool" else turn("", ("look", f'{{"n": {len(model.seen)}}}'))

    model = ScriptedModel([plays])
    result = await Agent(model, ToolRegistry([look]), "s").run("go")
    assert result.status is RunStatus.CONTEXT_FULL and len(model.summaries) == 3


async def test_a_full_window_with_nothing_to_compress_ends_the_run() -> None:
    model = ScriptedModel([overflow()])
    result = await Agent(model, ToolRegistry([look]), "s").run("go")
    assert result.status is RunStatus.CONTEXT_FULL and len(model.seen) == 1


async def test_case32_the_output_budget_never_exceeds_the_window() -> None:
    model = ScriptedModel([turn("", ("look", "{}")), turn("done")])
    meter = EncoderMeter(TOKENIZER)
    agent = Agent(model, ToolRegistry([look]), "s", options=options(4000, 5000), meter=meter)
    await agent.run("go")
    for seen in model.seen:
        assert seen.options.max_output_tokens == 5000 - sized(seen.messages, seen.tools)


async def test_tokens_of_summaries_count_for_the_token_budget() -> None:
    model = ScriptedModel(
        [
            turn("", ("look", "{}"), usage=Usage(500, 10, 490)),
            turn("S", usage=Usage(510, 100, 500)),
            turn("", ("look", "{}")),
        ]
    )
    agent = Agent(model, ToolRegistry([look]), "s", limits=Limits(token_budget=120), options=options(400))
    result = await agent.run("go")
    assert result.status is RunStatus.TOKEN_BUDGET and len(result.steps) == 2


async def test_a_result_that_was_cut_is_kept_whole_and_can_be_read_in_parts() -> None:
    text = "".join(f"line {n}\n" for n in range(5000))

    @tool
    async def big() -> str:
        """Is big."""
        return text

    model = ScriptedModel(
        [
            turn("", ("big", "{}")),
            turn("", ("read_history", '{"call_id": "c0", "offset": 20000}'), ids="r"),
            turn("", ("search_history", '{"text": "line 4999"}'), ids="f"),
            turn("done"),
        ]
    )
    registry = ToolRegistry([big, *recovery_tools()], max_result_bytes=30_000)
    await Agent(model, registry, "s").run("go")
    cut = str(model.seen[1].messages[-1].content)
    assert "bytes omitted" in cut and cut.endswith("read it in parts with read_history(call_id='c0').]")
    part = str(model.seen[2].messages[-1].content)
    assert part.startswith(text[20000:30000]) and "continue with offset=40000" in part
    assert "line 4999" in str(model.seen[3].messages[-1].content)


async def test_after_a_compression_the_exact_text_can_be_looked_up_and_the_plan_is_there() -> None:
    plan = Plan()
    items = '{"items": [{"text": "find the key", "state": "done"}, {"text": "open the door", "state": "doing"}]}'
    model = ScriptedModel(
        [
            turn("", ("update_plan", items), ("look", "{}"), reasoning="the key is 4711", usage=Usage(500, 1, 0)),
            turn("SUMMARY"),
            turn("", ("search_history", '{"text": "4711"}'), ids="f"),
            turn("", ("read_history", '{"first": 3}'), ids="r"),
            turn("done"),
        ]
    )
    registry = ToolRegistry([look, plan.tool(), *recovery_tools()])
    settings = CompressionSettings(400, backoff_s=0.0)
    store = MemoryRunStore()
    agent = Agent(model, registry, "s", options=AgentOptions(settings, plan.attachments), store=store)
    await agent.run("go")
    note = str(model.steps[1].messages[-1].content)
    assert "2. [>] open the door" in note and "messages 1 to 5 of this session" in note and "4711" not in note
    assert "[3] " in str(model.steps[2].messages[-1].content)
    assert "the key is 4711" in str(model.steps[3].messages[-1].content)
    restored = Plan()
    restored.restore(store.entries())
    assert restored.text() == plan.text() != ""


async def test_a_long_run_over_many_windows_replays_byte_for_byte() -> None:
    def plays(seen: Seen) -> AssistantTurn:
        if is_summary(seen):
            return turn(f"SUMMARY {len(model.summaries)}")
        number = len(model.steps)
        return turn("done") if number == 200 else turn("", *(("look", f'{{"n": {number * 4 + k}}}') for k in range(4)))

    model = ScriptedModel([plays], count=counted)
    store, meter = MemoryRunStore(), EncoderMeter(TOKENIZER)
    agent = Agent(
        model, ToolRegistry([look]), "s", store=store, meter=meter, limits=Limits(max_steps=200), options=options(6000)
    )
    result = await agent.run("go")
    assert result.completed and len(result.steps) == 200 and len(model.summaries) > 5
    requests = list(replay(store.entries()))
    assert len(requests) == len(model.seen) and all(request.exact for request in requests)
    assert recover(store.entries()).conversation.messages == agent.conversation.messages
    assert max(sized(seen.messages, seen.tools) for seen in model.steps) < 6000, "no step was sent at the trigger"
    for seen in model.steps:
        note = [m for m in seen.messages if "SUMMARY" in str(m.content)]
        assert len(note) <= 1


async def test_without_compression_nothing_is_summarised() -> None:
    model = ScriptedModel([turn("", ("look", "{}"), usage=Usage(10**6, 1, 0)), turn("done")])
    agent = Agent(model, ToolRegistry([look]), "s", options=AgentOptions(None), limits=Limits(retries=Retries(0)))
    assert (await agent.run("go")).completed and model.summaries == []
    with pytest.raises(RuntimeError, match="without compression"):
        await agent.compress()


async def test_a_compression_in_the_middle_of_an_answer_or_a_tool_keeps_the_count_exact() -> None:
    """The answer belongs to the old prompt and comes into the new window; what was reported about it must not count."""

    @tool(parallel=False)
    async def shorten() -> str:
        """Compresses while it runs."""
        return (await agent.compress()).outcome

    async def plays(seen: Seen) -> AssistantTurn:
        if is_summary(seen):
            return turn("SUMMARY")
        step = len(model.steps)
        if step == 2:
            return turn("", ("shorten", "{}"), ("look", "{}"))
        if step == 4:
            await agent.compress()
        return turn("done") if step == 12 else turn("", ("look", f'{{"n": {step}}}'))

    model = ScriptedModel([plays], count=counted)
    meter, sizes = EncoderMeter(TOKENIZER), list[int | None]()
    agent = Agent(model, ToolRegistry([look, shorten]), "s", meter=meter)

    def before(event: Event) -> None:
        if isinstance(event, StepStarted):
            sizes.append(meter.count(agent.conversation.messages, agent.tools))

    result = await agent.run("go", on_event=before)
    assert result.completed and len(model.summaries) == 2 and agent.history.window.number == 2
    assert result.steps[1].tools[0].result.model == "compressed"
    assert sizes == [sized(seen.messages, seen.tools) for seen in model.steps]
    assert recover(agent.history.store.entries()).conversation.messages == agent.conversation.messages
    assert all(made.exact for made in replay(agent.history.store.entries()))


async def test_the_program_in_the_documentation_can_be_run(repository: Path) -> None:
    program = (repository / "docs/compression.md").read_text("utf-8").partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(compile(program, "docs/compression.md", "exec"), names)
    with serve(says("hello")) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            agent = await names["make"](client, ensure())
            assert (await agent.run("hi")).text == "hello" and agent.compressor is not None
            assert agent.compressor.settings.trigger == 300_000


@pytest.mark.parametrize("has_cache", [True, False])
async def test_the_endpoint_is_told_which_prefix_died_whether_it_listens_or_not(has_cache: bool) -> None:
    meter = EncoderMeter(TOKENIZER)
    with serve(calls(("look", {})), says("done"), says("SUMMARY")) as endpoint:
        endpoint.has_cache = has_cache
        async with ChatClient(endpoint.base_url) as client:
            agent = Agent(client, ToolRegistry([look]), "s", options=AgentOptions(session="mine"), meter=meter)
            await agent.run("go")
            assert (await agent.compress()).outcome == "compressed"
            messages = agent.conversation.messages
    head = sized(messages[:2], agent.tools)
    assert endpoint.abandoned == [{"session": "session:mine", "from": head}], "system text, tools and the task live on"
