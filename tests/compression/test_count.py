"""Token counts are exact: against the encoder, and against what the gateway and its engine really were given."""

from typing import Any

import pytest

from agent_runtime.compression.count import EncoderMeter, UsageMeter
from agent_runtime.conversation import Message, Usage
from agent_runtime.engine.openai_chat import ChatClient
from agent_runtime.events import RunStatus, StepStarted
from agent_runtime.loop import Agent, Limits
from agent_runtime.tools.registry import ToolRegistry, tool
from k3_sglang.chat.encode import encode
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest
from tests.agent.scripted_model import ScriptedModel, turn
from tests.compression.histories import TOOLS, made, user, work
from tests.gateway.conftest import Running, engine_url, gateway, keys, settings, stub, tokenizer, writer
from tests.gateway.stub_engine import Script, StubEngine, says
from tests.gateway.vocabulary import TurnWriter

__all__ = ["engine_url", "gateway", "keys", "settings", "stub", "tokenizer", "writer"]

END_OF_MSG = 258


@tool
async def look(where: str) -> str:
    """Looks.

    Args:
        where: Where.
    """
    return f"nothing {where} 🙂"


async def test_what_is_counted_before_each_step_is_what_the_engine_is_given(
    gateway: Running, stub: StubEngine, tokenizer: K3Tokenizer, writer: TurnWriter
) -> None:
    """The spelling of the arguments is not the one the encoder would write: reported ids count, not rendered text."""

    def plan(body: dict[str, Any]) -> Script:
        step = len(stub.requests)
        calls = (("look", (("where", "string", f"there {step}"),)),) * 4 if step < 20 else ()
        return says(writer.turn(f"hm {step}", "" if calls else "done", calls), end_of_msg=END_OF_MSG)

    stub.plan = plan
    meter, counted = EncoderMeter(tokenizer), list[int | None]()
    async with ChatClient(f"{gateway.url}/v1") as client:
        agent = Agent(client, ToolRegistry([look]), "be good", meter=meter)

        def before(event: object) -> None:
            if isinstance(event, StepStarted):
                counted.append(meter.count(agent.conversation.messages, ToolRegistry([look]).schemas()))

        first = await agent.run("one", on_event=before)
        second = await agent.run("two", on_event=before)
    assert first.status is RunStatus.COMPLETED and len(first.steps) == 20
    assert counted == [len(request["input_ids"]) for request in stub.requests]
    assert counted == [step.prompt_tokens for step in (*first.steps, *second.steps)]
    before_, after = (request["input_ids"] for request in stub.requests[3:5])
    assert after[: len(before_)] == before_


async def test_endpoints_that_leave_the_stub_out_of_their_count_are_recognised(tokenizer: K3Tokenizer) -> None:
    meter = EncoderMeter(tokenizer)
    sent = [user("task")]
    whole = len(encode(ChatRequest(tuple(sent), tuple(TOOLS)), tokenizer).ids)
    for reported in (whole, whole - 3):
        meter.calibrate(sent, TOOLS, reported)
        meter.observe(sent, turn("x", usage=Usage(reported, 10, 0)))
        assert meter.count(
            [*sent, Message(role="assistant", content="x", reasoning="think")], TOOLS
        ) == whole + 10 + len(encode(ChatRequest((), effort=None), tokenizer).ids)


@pytest.mark.parametrize("history", [work(2), [*work(2), user("more")], [user("x"), *made("a", "1", "2", "3", "4")]])
def test_without_a_report_everything_is_encoded(history: list[Message], tokenizer: K3Tokenizer) -> None:
    exact = len(encode(ChatRequest(tuple(history), tuple(TOOLS)), tokenizer).ids)
    assert EncoderMeter(tokenizer).count(history, TOOLS) == exact


def test_an_answer_that_was_cut_is_no_anchor(tokenizer: K3Tokenizer) -> None:
    """The gateway renders such a turn from its text, with the ends it did not have."""
    meter, sent = EncoderMeter(tokenizer), [user("task")]
    cut = turn("half", finish="length", usage=Usage(999, 999, 0))
    meter.observe(sent, cut)
    exact = len(encode(ChatRequest((*sent, cut.message())), tokenizer).ids)
    assert meter.count([*sent, cut.message()], ()) == exact


def test_without_a_tokenizer_what_was_reported_counts_and_texts_are_bounded_by_bytes() -> None:
    meter = UsageMeter()
    assert meter.count([user("x")], TOOLS) is None
    meter.observe([user("x")], turn("y", usage=Usage(299_000, 1_000, 0)))
    assert meter.count([user("x")], TOOLS) == 300_000
    assert meter.text_tokens("é🙂") == 6
    sent = [user("x"), *made("a", "é" * 100)]
    assert meter.bound(sent, TOOLS) == 300_000 + 200 + 200 + 3, "what was added is bounded by its bytes"
    meter.reset()
    assert meter.count([], ()) is None and meter.bound([], ()) is None


@pytest.mark.parametrize(("tokens", "summaries"), [(299_999, 0), (300_000, 1)])
async def test_an_agent_compresses_at_300000_exact_tokens_and_not_at_299999(
    tokens: int, summaries: int, tokenizer: K3Tokenizer
) -> None:
    """The size is that of the next prompt, to the token: a tool result is made as long as it takes."""
    meter = EncoderMeter(tokenizer)

    @tool
    async def fill() -> str:
        """Fills up."""
        waiting = agent.conversation.messages
        empty = Message(role="tool", content="", tool_call_id="c0")
        have = meter.count([*waiting, empty], agent.tools)
        assert have is not None
        return "x" * (tokens - have)

    def count(seen: Any) -> int:
        return len(encode(ChatRequest(seen.messages, tuple(seen.tools)), tokenizer).ids)

    model = ScriptedModel([turn("", ("fill", "{}")), turn("S" if summaries else "done"), turn("done")])
    registry = ToolRegistry([fill], max_result_bytes=400_000)
    agent = Agent(model, registry, "be good", meter=meter, limits=Limits(max_steps=2))
    result = await agent.run("go")
    assert result.text == "done" and len(model.summaries) == summaries
    sizes = [count(seen) for seen in model.steps]
    assert sizes[-1] == tokens if not summaries else sizes[-1] < 30_000
    if summaries:
        assert count(model.summaries[0]) > tokens and model.summaries[0].messages[:-1] == (
            *model.steps[0].messages,
            *model.summaries[0].messages[2:4],
        )


@pytest.mark.parametrize(("completion", "summaries"), [(999, 0), (1000, 1)])
async def test_reported_tokens_trigger_at_300000_and_not_at_299999(completion: int, summaries: int) -> None:
    @tool
    async def look() -> str:
        """Looks."""
        return "x"

    first = turn("", ("look", "{}"), usage=Usage(299_000, completion, 0))
    model = ScriptedModel([first, turn("S" if summaries else "done", usage=Usage(9, 1, 0)), turn("done")])
    agent = Agent(model, ToolRegistry([look]), limits=Limits(max_steps=2))
    assert (await agent.run("go")).text == "done"
    assert len(model.summaries) == summaries
