"""Histories sent back as messages become the very ids the model generated, and nothing else ever matches."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime.guard.history import NAMELESS
from agent_runtime.guard.prompt import HistoryGuard
from agent_runtime.ledger.turns import TurnIndex
from k3_sglang.chat.encode import encode
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import chat, chat_with_tool, continued, tool_results, user
from tests.gateway.conftest import Running
from tests.gateway.stub_engine import Script, StubEngine, cut, says
from tests.gateway.vocabulary import TurnWriter, byte_tokenizer

END_OF_MSG = 258
# Written as no renderer would: "3.0" and the escaped quote are the model's own spelling.
ODD_CALL = ("get_weather", (("city", "string", 'Oslo "x"'), ("days", "number", "3.0")))


class Session:
    """Talks to the gateway turn by turn with a model whose output is odd but legal."""

    def __init__(self, gateway: Running, stub: StubEngine) -> None:
        self.gateway = gateway
        self.stub = stub

    async def ask(self, body: dict[str, Any], ids: list[int]) -> tuple[dict[str, Any], list[int], str]:
        """The answer, the prompt ids it was made from, and the replay header."""
        self.stub.plan = lambda _: says(ids, end_of_msg=END_OF_MSG)
        response = await self.gateway.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json(), self.stub.requests[-1]["input_ids"], response.headers["x-k3-replay"]


@pytest.fixture
def session(gateway: Running, stub: StubEngine) -> Session:
    """A session on the served gateway."""
    return Session(gateway, stub)


async def test_each_prompt_begins_with_the_prompt_before_and_what_was_generated(
    session: Session, writer: TurnWriter
) -> None:
    first = chat_with_tool()
    ids = writer.turn("hm\n", "I look.", (ODD_CALL, ODD_CALL))
    answer, prompt, replay = await session.ask(first, ids)
    assert replay == "new; exact=0; repaired=0; missing=0; foreign=0"

    second = continued(first, answer, *tool_results(answer, "rain", "sun"))
    more = writer.turn("", "")
    answer2, prompt2, replay2 = await session.ask(second, more)
    assert prompt2[: len(prompt) + len(ids)] == prompt + ids
    assert replay2 == "exact; exact=1; repaired=0; missing=0; foreign=0"

    third = continued(second, answer2, user("and?"))
    answer3, prompt3, replay3 = await session.ask(third, writer.turn("x", "y"))
    assert prompt3[: len(prompt2) + len(more)] == prompt2 + more
    assert replay3 == "exact; exact=2; repaired=0; missing=0; foreign=0"
    facts = {"verdict": "exact", "exact": 2, "repaired": 0, "missing": 0, "foreign": 0, "prefix": {"holds": True}}
    assert answer3["k3"]["replay"] == facts


async def test_a_turn_that_skips_its_channels_is_replayed_as_it_was(
    session: Session, tokenizer: K3Tokenizer, writer: TurnWriter
) -> None:
    """The model may end a turn without closing anything; only its ids can say so."""
    ids = [*writer.text("thought that never closed"), END_OF_MSG]
    answer, prompt, _ = await session.ask(chat(), ids)
    _, prompt2, replay = await session.ask(continued(chat(), answer, user("go on")), writer.turn())
    assert prompt2[: len(prompt) + len(ids)] == prompt + ids
    assert replay.startswith("exact")


async def test_clients_may_change_what_carries_no_meaning(session: Session, writer: TurnWriter) -> None:
    body = chat_with_tool()
    ids = writer.turn("R", "Look", (ODD_CALL,))
    answer, prompt, _ = await session.ask(body, ids)
    message = answer["choices"][0]["message"]
    message["content"] = [{"type": "text", "text": "Lo"}, {"type": "text", "text": "ok"}]
    call = message["tool_calls"][0]
    call["id"] = "renamed_by_client"
    call["function"]["arguments"] = '{ "days":3 , "city":"Oslo \\"x\\"" }'
    following = {"role": "tool", "tool_call_id": "renamed_by_client", "content": "rain"}
    _, prompt2, replay = await session.ask(continued(body, answer, following), writer.turn())
    assert replay == "exact; exact=1; repaired=0; missing=0; foreign=0"
    assert prompt2[: len(prompt) + len(ids)] == prompt + ids


@pytest.mark.parametrize(
    "change",
    [
        {"content": "Changed"},
        {"tool_calls": None},
        {"name": "someone"},
    ],
)
async def test_a_changed_turn_is_rendered_from_its_text(
    session: Session, writer: TurnWriter, change: dict[str, Any], tokenizer: K3Tokenizer
) -> None:
    body = chat_with_tool()
    answer, _, _ = await session.ask(body, writer.turn("R", "Look", (ODD_CALL,)))
    answer["choices"][0]["message"].update(change)
    following = user("go on") if "tool_calls" in change else tool_results(answer, "rain")[0]
    second = continued(body, answer, following)
    _, prompt, replay = await session.ask(second, writer.turn())
    assert replay == "foreign; exact=0; repaired=0; missing=0; foreign=1"
    fields = {key: second[key] for key in ("messages", "tools")}
    assert prompt == list(encode(parse_request(fields), tokenizer).ids)


async def test_the_same_turn_after_another_conversation_is_not_replayed(session: Session, writer: TurnWriter) -> None:
    answer, _, _ = await session.ask(chat("one"), writer.turn("R", "same"))
    _, _, replay = await session.ask(continued(chat("two"), answer, user("go on")), writer.turn())
    assert replay == "foreign; exact=0; repaired=0; missing=0; foreign=1"


async def test_instructions_for_one_turn_do_not_break_the_chain(session: Session, writer: TurnWriter) -> None:
    body = chat_with_tool(tool_choice="required")
    ids = writer.turn("R", "", (ODD_CALL,))
    answer, _, _ = await session.ask(body, ids)
    body.pop("tool_choice")
    _, prompt, replay = await session.ask(continued(body, answer, *tool_results(answer, "x")), writer.turn())
    assert replay.startswith("exact")
    assert any(prompt[start : start + len(ids)] == ids for start in range(len(prompt) - len(ids)))


async def test_turns_that_were_cut_stopped_or_not_fully_delivered_are_not_replayed_by_their_ids(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    whole = writer.turn("R", "one STOP", (ODD_CALL,))
    stub.plan = lambda body: cut(whole)
    await gateway.ask(chat_with_tool())
    stub.plan = lambda body: says(whole, end_of_msg=END_OF_MSG)
    await gateway.ask(chat_with_tool(stop="STOP"))
    await gateway.ask(chat())
    assert [turn.ids for turn in gateway.app.state.record.guard("").index] == [None, None, None]
    await gateway.ask(chat_with_tool())
    assert [turn.ids for turn in gateway.app.state.record.guard("").index][-1] == tuple(whole)


async def test_a_stopped_turn_that_loses_its_thinking_gets_it_back_as_text(
    session: Session, writer: TurnWriter, tokenizer: K3Tokenizer
) -> None:
    body = chat(stop="STOP")
    answer, _, _ = await session.ask(body, writer.turn("my thoughts", "one STOP two"))
    second = continued(body, answer, user("go on"))
    wanted = list(encode(parse_request({"messages": second["messages"]}), tokenizer).ids)
    del second["messages"][1]["reasoning_content"]
    answer, prompt, replay = await session.ask(second, writer.turn())
    assert prompt == wanted
    assert replay.startswith("repaired")
    assert answer["k3"]["replay"]["prefix"]["moved"] == "turn"


async def test_every_choice_can_be_continued(
    gateway: Running, stub: StubEngine, writer: TurnWriter, session: Session
) -> None:
    outputs = [writer.turn("R", f"answer {i}") for i in range(3)]

    def plan(body: dict[str, Any]) -> Script:
        return says(outputs[len(stub.requests) - 1], end_of_msg=END_OF_MSG)

    stub.plan = plan
    answer = await gateway.ask(chat(n=3))
    for choice in answer["choices"]:
        chosen = {"choices": [choice]}
        _, _, replay = await session.ask(continued(chat(), chosen, user("go on")), writer.turn())
        assert replay.startswith("exact")


def turns() -> st.SearchStrategy[list[dict[str, Any]]]:
    """Histories of user, assistant and tool messages, each call answered."""
    text = st.text("ab <|🙂", max_size=6)
    calls = st.lists(st.dictionaries(text, text | st.integers(0, 3), max_size=2), max_size=2)

    def messages(number: int, parts: tuple[str, str, str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        question, reasoning, content, arguments = parts
        tool_calls = [
            {"id": f"c{number}{i}", "type": "function", "function": {"name": "f", "arguments": json.dumps(value)}}
            for i, value in enumerate(arguments)
        ]
        assistant = {"role": "assistant", "reasoning_content": reasoning and f"t{reasoning}", "content": content}
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in tool_calls]
        return [
            user(question or "q"),
            assistant | ({"tool_calls": tool_calls} if tool_calls else {}),
            *results[::-1],
        ]

    return st.lists(st.tuples(text, text, text, calls), max_size=3).map(
        lambda groups: [message for number, group in enumerate(groups) for message in messages(number, group)]
    )


@settings(deadline=None)
@given(history=turns(), known=st.lists(st.booleans(), min_size=3, max_size=3), thinking=st.booleans())
def test_the_prompt_equals_encoding_with_the_recorded_turns_in_place(
    history: list[dict[str, Any]], known: list[bool], thinking: bool
) -> None:
    tokenizer = byte_tokenizer()
    request = parse_request({"messages": [*history, user("last")], "thinking": thinking})
    guard = HistoryGuard(TurnIndex(10_000, 100))
    messages = list(request.messages)
    assistants = [index for index, message in enumerate(messages) if message.role == "assistant"]
    for keep, index in zip(known, assistants, strict=False):
        if not keep:
            continue
        ids = (*tokenizer.encode_text(f"recorded {index}"), END_OF_MSG)
        before = guard.build(replace(request, messages=tuple(messages[:index])), NAMELESS, tokenizer)
        guard.record(before, index + 1, 1, messages[index], ids, whole=True)
        messages[index] = replace(messages[index], recorded_ids=ids, recorded_start=request.start)
    built = guard.build(request, NAMELESS, tokenizer)
    assert built.prompt == encode(replace(request, messages=tuple(messages)), tokenizer)
    assert built.replay.counts["exact"] == sum(known[: len(assistants)])
    assert len(built.replay.checks) == len(assistants)
