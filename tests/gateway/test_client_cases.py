"""What clients and the gateways before ours do to chat bodies, over HTTP: the numbers are those of the survey."""

import asyncio
import re
from collections import defaultdict
from typing import Any

import pytest

from agent_runtime.generation import INTERRUPTED_MARK
from tests.gateway.bodies import chat, chat_with_tool, continued, tool_results, user
from tests.gateway.conftest import Running
from tests.gateway.stub_engine import Script, StubEngine, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258
CALL = ("get_weather", (("city", "string", "Oslo"), ("days", "number", "3")))


@pytest.fixture
def strict(settings: dict[str, Any]) -> None:
    """The guard refuses what is not as it was generated."""
    settings["guard"] = "strict"


@pytest.fixture
async def history(gateway: Running, stub: StubEngine, writer: TurnWriter) -> dict[str, Any]:
    """A request whose history has a turn with a call and one without, both with thinking."""
    body = chat_with_tool()
    for reasoning, content, calls in (("first thoughts", "I look.", (CALL,)), ("second thoughts", "Rain.", ())):
        ids = writer.turn(reasoning, content, calls)
        stub.plan = lambda _, ids=ids: says(ids, end_of_msg=END_OF_MSG, piece=1000)
        answer = await gateway.ask(body)
        body = continued(body, answer, *(tool_results(answer, "rain") if calls else [user("And now?")]))
    return body


async def prompts(gateway: Running, stub: StubEngine, *bodies: dict[str, Any]) -> list[list[int]]:
    """The ids the engine is given for each of some requests."""
    for body in bodies:
        await gateway.ask(body)
    return [request["input_ids"] for request in stub.requests[-len(bodies) :]]


def with_turns(body: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    """The request with fields of its assistant messages set; a field set to None is left out."""
    pending = iter(changes)
    messages = [{**m, **next(pending)} if m["role"] == "assistant" else m for m in body["messages"]]
    return {**body, "messages": [{k: v for k, v in m.items() if v is not None} for m in messages]}


async def test_case_22_thinking_lost_before_a_call_in_a_conversion_comes_back(
    gateway: Running, stub: StubEngine, history: dict[str, Any]
) -> None:
    whole, sent = await prompts(gateway, stub, history, with_turns(history, {"reasoning_content": None}, {}))
    assert sent == whole


async def test_case_23_a_body_as_gateways_write_it_gets_each_turns_own_thinking(
    gateway: Running, stub: StubEngine, history: dict[str, Any]
) -> None:
    """No thinking, texts as lists of parts, arguments written anew."""
    lost = with_turns(history, {"reasoning_content": None}, {"reasoning_content": None})
    for message in lost["messages"]:
        message["content"] = [{"type": "text", "text": message["content"]}]
        for call in message.get("tool_calls", ()):
            call["function"] = {**call["function"], "arguments": '{ "days": 3.0,  "city": "Oslo" }'}
    whole, sent = await prompts(gateway, stub, history, lost)
    assert sent == whole


async def test_case_24_thinking_that_a_gateway_writes_twice_is_in_the_prompt_once(
    gateway: Running, stub: StubEngine, history: dict[str, Any]
) -> None:
    doubled = with_turns(
        history,
        {"reasoning_content": "first thoughtsfirst thoughts"},
        {"reasoning_content": "second thoughts\nsecond thoughts", "reasoning": "second thoughts\nsecond thoughts"},
    )
    whole, sent = await prompts(gateway, stub, history, doubled)
    assert sent == whole
    assert bytes(token for token in sent if token < 256).count(b"first thoughts") == 1


async def test_case_30_of_32_sessions_at_once_none_is_given_the_thinking_of_another(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    """Their openings and answers are equal; thinking is a nonce, which every client drops."""
    made = 0

    def plan(body: dict[str, Any]) -> Script:
        nonlocal made
        made += 1
        return says(writer.turn(f"nonce {made:06}", "Done."), end_of_msg=END_OF_MSG, piece=20)

    stub.plan = plan
    nonces: dict[str, list[str]] = defaultdict(list)

    async def session(name: str) -> None:
        body = chat("Do it.", prompt_cache_key=name)
        for step in range(4):
            answer = await gateway.ask(body)
            nonces[name].append(answer["choices"][0]["message"].pop("reasoning_content"))
            body = continued(body, answer, user(f"I am {name}, step {step}."))

    async with asyncio.TaskGroup() as tasks:
        for number in range(32):
            tasks.create_task(session(f"session-{number:02}"))
    seen = 0
    for request in stub.requests:
        text = bytes(token for token in request["input_ids"] if token < 256).decode()
        names = set(re.findall(r"I am (session-\d\d)", text))
        found = re.findall(r"nonce \d{6}", text)
        assert len(names) <= 1
        assert found == (nonces[names.pop()][: len(found)] if names else [])
        assert len(found) == text.count("I am session")
        seen += len(found)
    assert seen == 32 * (1 + 2 + 3)


@pytest.mark.usefixtures("strict")
async def test_a_turn_that_the_client_marks_as_interrupted_passes_and_is_told_of(gateway: Running) -> None:
    body = chat()
    turn = {"role": "assistant", "content": f"We have{INTERRUPTED_MARK}"}
    answer = await gateway.ask({**body, "messages": [*body["messages"], turn, user("Go on.")]})
    replay = answer["k3"]["replay"]
    assert replay["verdict"] == "missing"
    assert [(turn["index"], turn["reason"]) for turn in replay["turns"]] == [(1, "interrupted")]


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("turn", [{"content": "[interrupted] by you"}, {"content": "We have"}])
async def test_a_turn_that_is_unknown_and_not_marked_is_refused(gateway: Running, turn: dict[str, Any]) -> None:
    body = chat()
    turns = [{"role": "assistant", **turn}, user("Go on.")]
    error = (await gateway.ask({**body, "messages": [*body["messages"], *turns]}, 409))["error"]
    assert error["code"] == "history_not_intact" and error["param"] == "messages[1]"
