"""Histories sent back as messages become the very ids the model generated, and nothing else ever matches."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agent_runtime.gateway.prompt import build_prompt
from agent_runtime.ledger.recorded import MAX_SPELLINGS, ContextDigest, RecordedTurns
from k3_sglang.chat.encode import encode
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Message, TextPart, ToolCall
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
    assert replay == "new; exact=0; rendered=0"

    second = continued(first, answer, *tool_results(answer, "rain", "sun"))
    more = writer.turn("", "")
    answer2, prompt2, replay2 = await session.ask(second, more)
    assert prompt2[: len(prompt) + len(ids)] == prompt + ids
    assert replay2 == "exact; exact=1; rendered=0"

    third = continued(second, answer2, user("and?"))
    answer3, prompt3, replay3 = await session.ask(third, writer.turn("x", "y"))
    assert prompt3[: len(prompt2) + len(more)] == prompt2 + more
    assert replay3 == "exact; exact=2; rendered=0"
    assert answer3["k3"]["replay"] == {"verdict": "exact", "exact": 2, "rendered": 0}


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
    assert replay == "exact; exact=1; rendered=0"
    assert prompt2[: len(prompt) + len(ids)] == prompt + ids


@pytest.mark.parametrize(
    "change",
    [
        {"content": "Changed"},
        {"reasoning_content": "Changed"},
        {"reasoning_content": None},
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
    assert replay == "rendered; exact=0; rendered=1"
    fields = {key: second[key] for key in ("messages", "tools")}
    assert prompt == list(encode(parse_request(fields), tokenizer).ids)


async def test_the_same_turn_after_another_conversation_is_not_replayed(session: Session, writer: TurnWriter) -> None:
    answer, _, _ = await session.ask(chat("one"), writer.turn("R", "same"))
    _, _, replay = await session.ask(continued(chat("two"), answer, user("go on")), writer.turn())
    assert replay == "rendered; exact=0; rendered=1"


async def test_instructions_for_one_turn_do_not_break_the_chain(session: Session, writer: TurnWriter) -> None:
    body = chat_with_tool(tool_choice="required")
    ids = writer.turn("R", "", (ODD_CALL,))
    answer, _, _ = await session.ask(body, ids)
    body.pop("tool_choice")
    _, prompt, replay = await session.ask(continued(body, answer, *tool_results(answer, "x")), writer.turn())
    assert replay.startswith("exact")
    assert any(prompt[start : start + len(ids)] == ids for start in range(len(prompt) - len(ids)))


async def test_turns_that_were_cut_stopped_or_not_fully_delivered_are_not_recorded(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    whole = writer.turn("R", "one STOP", (ODD_CALL,))
    stub.plan = lambda body: cut(whole)
    await gateway.ask(chat_with_tool())
    stub.plan = lambda body: says(whole, end_of_msg=END_OF_MSG)
    await gateway.ask(chat_with_tool(stop="STOP"))
    await gateway.ask(chat())
    assert len(gateway.app.state.recorded) == 0
    await gateway.ask(chat_with_tool())
    assert len(gateway.app.state.recorded) == 1


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

    def messages(parts: tuple[str, str, str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        question, reasoning, content, arguments = parts
        tool_calls = [
            {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": json.dumps(value)}}
            for i, value in enumerate(arguments)
        ]
        assistant = {"role": "assistant", "reasoning_content": reasoning, "content": content}
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in tool_calls]
        return [
            user(question or "q"),
            assistant | ({"tool_calls": tool_calls} if tool_calls else {}),
            *results[::-1],
        ]

    return st.lists(st.tuples(text, text, text, calls).map(messages), max_size=3).map(
        lambda groups: [message for group in groups for message in group]
    )


@settings(deadline=None)
@given(history=turns(), known=st.lists(st.booleans(), min_size=3, max_size=3), thinking=st.booleans())
def test_the_walk_equals_encoding_with_the_recorded_turns_in_place(
    history: list[dict[str, Any]], known: list[bool], thinking: bool
) -> None:
    tokenizer = byte_tokenizer()
    request = parse_request({"messages": [*history, user("last")], "thinking": thinking})
    recorded = RecordedTurns(10_000, 100)
    messages = list(request.messages)
    assistants = [index for index, message in enumerate(messages) if message.role == "assistant"]
    for keep, index in zip(known, assistants, strict=False):
        if not keep:
            continue
        ids = (*tokenizer.encode_text(f"recorded {index}"), END_OF_MSG)
        before = replace(request, messages=tuple(messages[:index]), add_generation_prompt=False)
        context = ContextDigest()
        context.extend(encode(before, tokenizer).ids)
        recorded.record(context.digest(), request.start, messages[index], ids)
        messages[index] = replace(messages[index], recorded_ids=ids, recorded_start=request.start)
    built = build_prompt(request, tokenizer, recorded)
    assert built.prompt == encode(replace(request, messages=tuple(messages)), tokenizer)
    assert built.replay.exact == sum(known[: len(assistants)])
    assert built.replay.exact + built.replay.rendered == len(assistants)


TURN = Message(role="assistant", content="c", reasoning="r", tool_calls=(ToolCall("i", "f", '{"a": 1}'),))


@pytest.mark.parametrize(
    ("turn", "found"),
    [
        (TURN, True),
        (replace(TURN, content=(TextPart("c"),)), True),
        (replace(TURN, tool_calls=(ToolCall("other", "f", '{"a":1.0}'),)), True),
        (replace(TURN, tool_calls=(ToolCall("i", "f", '{"a": true}'),)), False),
        (replace(TURN, tool_calls=(ToolCall("i", "f", '{"a": "1"}'),)), False),
        (replace(TURN, tool_calls=(ToolCall("i", "g", '{"a": 1}'),)), False),
        (replace(TURN, tool_calls=TURN.tool_calls * 2), False),
        (replace(TURN, tool_calls=()), False),
        (replace(TURN, content="c "), False),
        (replace(TURN, content=None), False),
        (replace(TURN, reasoning=None), False),
        (replace(TURN, reasoning="c", content="r"), False),
        (replace(TURN, name="n"), False),
        (replace(TURN, role="user"), False),
    ],
)
def test_turns_match_by_meaning_and_by_nothing_less(turn: Message, found: bool) -> None:
    recorded = RecordedTurns(100, 10)
    recorded.record(b"context", "think", TURN, (1, 2, 3))
    assert recorded.find(b"context", "think", turn) == (((1, 2, 3),) if found else ())
    assert recorded.find(b"other", "think", turn) == ()
    assert recorded.find(b"context", "response", turn) == ()


def test_empty_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens=0"):
        RecordedTurns(0, 1)


class BoundedRecord(RuleBasedStateMachine):
    """Against a model that is a list in order of use."""

    MAX_TOKENS, MAX_TURNS = 10, 4

    def __init__(self) -> None:
        super().__init__()
        self.recorded = RecordedTurns(self.MAX_TOKENS, self.MAX_TURNS)
        self.model: dict[int, tuple[tuple[int, ...], ...]] = {}

    @rule(key=st.integers(0, 6), ids=st.lists(st.integers(0, 1), max_size=12).map(tuple))
    def record(self, key: int, ids: tuple[int, ...]) -> None:
        self.recorded.record(bytes((key,)), "think", TURN, ids)
        if not ids or len(ids) > self.MAX_TOKENS:
            return
        older = [known for known in self.model.pop(key, ()) if known != ids]
        kept = [ids, *older][:MAX_SPELLINGS]
        while sum(map(len, kept)) > self.MAX_TOKENS:
            kept.pop()
        self.model[key] = tuple(kept)
        while len(self.model) > self.MAX_TURNS or self.model_tokens > self.MAX_TOKENS:
            del self.model[next(iter(self.model))]

    @property
    def model_tokens(self) -> int:
        return sum(len(ids) for spellings in self.model.values() for ids in spellings)

    @rule(key=st.integers(0, 6))
    def find(self, key: int) -> None:
        assert self.recorded.find(bytes((key,)), "think", TURN) == self.model.get(key, ())
        if key in self.model:
            self.model[key] = self.model.pop(key)

    @invariant()
    def is_consistent(self) -> None:
        self.recorded.check_integrity()
        assert len(self.recorded) == len(self.model)
        assert self.recorded.tokens == self.model_tokens


TestBoundedRecord = BoundedRecord.TestCase
TestBoundedRecord.settings = settings(deadline=None, max_examples=50, stateful_step_count=30)
