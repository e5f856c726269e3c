"""One turn said in different ids by different sessions: each session goes on from its own."""

from typing import Any

import pytest

from tests.gateway.bodies import chat, chat_with_tool, continued, tool_results, user
from tests.gateway.conftest import Running
from tests.gateway.stub_engine import Script, StubEngine, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG, PAD = 258, 267


@pytest.fixture
def spellings(writer: TurnWriter) -> list[list[int]]:
    """The same call twice: equal by value, spelled differently."""
    return [
        writer.turn("R", "", (("get_weather", (("city", "string", "Oslo"), ("days", "number", days))),))
        for days in ("3", "3.0")
    ]


async def ask(gateway: Running, stub: StubEngine, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    stub.plan = lambda _: says(ids, end_of_msg=END_OF_MSG)
    return await gateway.ask(body)


async def test_sessions_with_equal_openings_go_on_from_their_own_ids(
    gateway: Running, stub: StubEngine, writer: TurnWriter, spellings: list[list[int]]
) -> None:
    bodies: list[dict[str, Any]] = []
    prompts: list[list[int]] = []
    for place, ids in enumerate(spellings):
        first = chat_with_tool()
        answer = await ask(gateway, stub, first, ids)
        second = continued(first, answer, *tool_results(answer, "rain"))
        answer = await ask(gateway, stub, second, writer.turn("R", f"It rains, {place}."))
        prompts.append(stub.requests[-1]["input_ids"])
        bodies.append(continued(second, answer, user("and now?")))
    for body, before in zip(bodies, prompts, strict=True):
        answer = await ask(gateway, stub, body, writer.turn())
        assert stub.requests[-1]["input_ids"][: len(before)] == before
        assert answer["k3"]["replay"]["exact"] == 2


async def test_call_ids_tell_sessions_apart_that_said_the_same_at_once(
    gateway: Running, stub: StubEngine, writer: TurnWriter, spellings: list[list[int]]
) -> None:
    body = chat_with_tool()
    answers = [await ask(gateway, stub, body, ids) for ids in spellings]
    prompt = stub.requests[-1]["input_ids"]
    for answer, ids in zip(answers, spellings, strict=True):
        await ask(gateway, stub, continued(body, answer, *tool_results(answer, "rain")), writer.turn())
        assert stub.requests[-1]["input_ids"][: len(prompt) + len(ids)] == prompt + ids


async def test_a_turn_made_again_is_continued_from_its_newest_ids(
    gateway: Running, stub: StubEngine, writer: TurnWriter, spellings: list[list[int]]
) -> None:
    body = chat_with_tool()
    for ids in (*spellings, spellings[0]):
        answer = await ask(gateway, stub, body, ids)
        prompt = stub.requests[-1]["input_ids"]
        await ask(gateway, stub, continued(body, answer, *tool_results(answer, "rain")), writer.turn())
        assert stub.requests[-1]["input_ids"][: len(prompt) + len(ids)] == prompt + ids


@pytest.mark.parametrize("piece", [1, 1000])
async def test_a_turn_with_a_foreign_control_token_is_never_replayed(
    gateway: Running, stub: StubEngine, writer: TurnWriter, piece: int
) -> None:
    """However the engine cuts its output: the control token ends the turn, and what follows is not part of it."""
    ids = [*writer.text("R"), PAD, *writer.turn("more", "Hi")]
    stub.plan = lambda _: says(ids, end_of_msg=END_OF_MSG, piece=piece)
    answer = await gateway.ask(chat())
    assert answer["choices"][0]["message"]["reasoning_content"] == "R"
    assert "control_token" in answer["choices"][0]["k3"]["warnings"]
    assert [turn.ids for turn in gateway.app.state.record.guard("").index] == [None]


async def test_output_behind_the_end_of_the_message_is_never_replayed(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    ids = [*writer.turn("R", "Hi"), *writer.turn("R", "again")]
    stub.plan = lambda _: Script([ids], {"type": "stop", "matched": END_OF_MSG})
    answer = await gateway.ask(chat())
    assert answer["choices"][0]["message"]["content"] == "Hi"
    assert [turn.ids for turn in gateway.app.state.record.guard("").index] == [None]
