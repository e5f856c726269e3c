"""What clients are known to do to a history, case by case: the numbers are those of the survey of clients."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from agent_runtime.guard.prompt import HistoryGuard, ReplayedPrompt
from agent_runtime.guard.verdict import Check
from agent_runtime.ledger.turns import TurnIndex
from k3_sglang.chat.types import Message
from tests.guard.conftest import Talk, call

Start = Callable[..., Talk]


@pytest.fixture
def session(talk: Start) -> Talk:
    """A question, a turn with two calls and their results, a turn with one, and another question."""
    told = talk()
    told.asks("find it")
    told.says("first thoughts about it", "I look.", (call(), call('{"path": "b", "line": 3.0}')))
    told.says("second thoughts about it", "", (call('{"path": "c"}'),))
    told.says("third thoughts about it", "Found.")
    told.asks("and now?")
    return told


def found(built: ReplayedPrompt) -> list[tuple[str, str | None]]:
    """Verdict and reason of every turn."""
    return [(check.verdict, check.reason) for check in built.replay.checks]


def thoughts(built: ReplayedPrompt) -> list[str | None]:
    """The thinking of every turn in the prompt."""
    return [message.reasoning for message in built.request.messages if message.role == "assistant"]


def assert_whole(session: Talk, built: ReplayedPrompt) -> None:
    """Every turn of the prompt is the very one that was generated."""
    recorded = [message.recorded_ids for message in built.request.messages if message.role == "assistant"]
    assert recorded == session.outputs
    assert thoughts(built) == [message.reasoning for message in session.messages if message.role == "assistant"]
    assert built.prompt == session.send().prompt


def changed(session: Talk, **fields: object) -> list[Message]:
    """The history with fields of all its turns changed."""
    return [replace(m, **fields) if m.role == "assistant" else m for m in session.messages]


def test_case_1_thinking_dropped_for_names_of_other_models_comes_back(session: Talk) -> None:
    built = session.send(session.without_thinking())
    assert_whole(session, built)
    assert found(built) == [("repaired", "absent")] * 3
    assert built.replay.header() == "repaired; exact=0; repaired=3; missing=0; foreign=0"
    assert session.guard.counters.snapshot()["turns"]["repaired"] == 3


def test_case_2_respaced_arguments_and_renamed_calls_are_the_same_turn(session: Talk) -> None:
    names: dict[str, str] = {}
    sent: list[Message] = []
    for message in session.without_thinking():
        calls = []
        for made in message.tool_calls:
            names[made.id] = f"tool_{len(names)}"
            arguments = json.dumps(dict(reversed(json.loads(made.arguments).items())), indent=2).replace("3.0", "3")
            calls.append(replace(made, id=names[made.id], arguments=arguments))
        result = names.get(message.tool_call_id or "", message.tool_call_id)
        sent.append(replace(message, tool_calls=tuple(calls), tool_call_id=result))
    assert_whole(session, session.send(sent))


def test_case_4_a_filler_is_no_thinking_and_never_kept(session: Talk) -> None:
    for filler in (".", " ", "...", "(placeholder)"):
        built = session.send(changed(session, reasoning=filler))
        assert_whole(session, built)
        assert {reason for _, reason in found(built)} <= {"filler", "absent"}
    stranger = [Message("user", "hi"), Message("assistant", "hello", "."), Message("user", "go on")]
    built = session.send(stranger)
    assert found(built) == [("missing", "filler")]
    assert thoughts(built) == [None]


def test_case_5_the_latest_thinking_in_every_gap_goes_back_to_its_own_turn(session: Talk) -> None:
    built = session.send(changed(session, reasoning="third thoughts about it"))
    assert_whole(session, built)
    assert found(built) == [("repaired", "duplicated"), ("repaired", "duplicated"), ("exact", None)]


def test_case_5_thinking_of_another_turn_is_taken_out_where_the_right_one_is_unknown(session: Talk) -> None:
    foreign = [Message("user", "before"), Message("assistant", "from elsewhere", "third thoughts about it")]
    built = session.send([*foreign, *session.messages])
    assert found(built)[0] == ("missing", "duplicated")
    assert thoughts(built)[0] is None
    assert thoughts(built)[1:] == [m.reasoning for m in session.messages if m.role == "assistant"]


def test_case_6_the_text_in_the_place_of_the_thinking_is_replaced(session: Talk) -> None:
    sent = [replace(m, reasoning=str(m.content)) if m.role == "assistant" else m for m in session.messages]
    built = session.send(sent)
    assert_whole(session, built)
    assert found(built) == [("repaired", "copied"), ("repaired", "absent"), ("repaired", "copied")]


def test_case_7_thinking_survives_a_restart(session: Talk) -> None:
    index = TurnIndex(100_000, 1000)
    for turn in session.guard.index:
        index.add(turn)
    restarted = replace(session, guard=HistoryGuard(index))
    assert_whole(session, restarted.send(session.without_thinking()))


def test_case_8_turns_of_another_model_are_flagged_and_get_nobodys_thinking(session: Talk) -> None:
    before: list[Message] = []
    for number in range(6):
        before += [Message("user", f"q{number}"), Message("assistant", f"<think>hm</think>a{number}")]
    built = session.send([*before, *session.without_thinking()])
    assert found(built)[:6] == [("missing", "unknown")] * 6
    assert thoughts(built)[:6] == [None] * 6
    assert built.replay.verdict == "missing"


@pytest.mark.parametrize("kept", [(True, True), (True, False), (False, True), (False, False)])
def test_case_17_prose_and_calls_in_two_messages_are_one_turn(session: Talk, kept: tuple[bool, bool]) -> None:
    sent: list[Message] = []
    for message in session.messages:
        if message.tool_calls and message.content:
            prose, calls = (message.reasoning if keep else None for keep in kept)
            sent += [replace(message, tool_calls=(), reasoning=prose), replace(message, content=None, reasoning=calls)]
        else:
            sent.append(message)
    built = session.send(sent)
    assert_whole(session, built)
    assert found(built)[0] == ("repaired", "split")


@pytest.mark.parametrize("marked", [0, 1])
def test_the_mark_on_either_half_of_a_split_turn_is_the_whole_turns(session: Talk, marked: int) -> None:
    place, whole = next((i, m) for i, m in enumerate(session.messages) if m.tool_calls and m.content)
    halves = [replace(whole, tool_calls=()), replace(whole, content=None, reasoning=None)]
    halves[marked] = replace(halves[marked], cache_ttl_s=3600)
    built = session.send([*session.messages[:place], *halves, *session.messages[place + 1 :]])
    assert_whole(session, built)
    assert [message.cache_ttl_s for message in built.request.messages if message.cache_ttl_s] == [3600]


def test_case_22_thinking_lost_before_calls_only_comes_back(session: Talk) -> None:
    sent = [replace(m, reasoning=None) if m.tool_calls else m for m in session.messages]
    built = session.send(sent)
    assert_whole(session, built)
    assert found(built) == [("repaired", "absent"), ("repaired", "absent"), ("exact", None)]


def test_case_23_thinking_shifted_to_the_next_turn_goes_back(session: Talk) -> None:
    turns = [message.reasoning for message in session.messages if message.role == "assistant"]
    shifted = iter((None, *turns))
    sent = [replace(m, reasoning=next(shifted)) if m.role == "assistant" else m for m in session.messages]
    built = session.send(sent)
    assert_whole(session, built)
    assert [reason for _, reason in found(built)] == ["absent", "duplicated", "duplicated"]


@pytest.mark.parametrize("glue", ["", "\n"])
def test_case_24_thinking_that_is_there_twice_is_there_once_again(session: Talk, glue: str) -> None:
    sent = [replace(m, reasoning=f"{m.reasoning}{glue}{m.reasoning}") if m.reasoning else m for m in session.messages]
    built = session.send(sent)
    assert_whole(session, built)
    assert found(built) == [("repaired", "padded")] * 3


def test_case_31_a_turn_that_was_thrown_away_is_put_back_in_a_named_session(talk: Start) -> None:
    told = talk("mine")
    told.asks("do it")
    told.says("should I call a tool?", "I would rather talk.")
    told.asks("no tool calls found")
    sent = [message for message in told.messages if message.role != "assistant"]
    built = told.send(sent)
    assert_whole(told, built)
    assert built.replay.checks == (Check(1, "repaired", "dropped"),)
    told.says("then I do", "", (call(),), sent=sent)
    kept = [message for message in told.messages if message.role != "assistant" or message.tool_calls]
    again = told.send(kept)
    assert_whole(told, again)
    assert again.replay.checks == (Check(1, "repaired", "dropped"), Check(2, "exact"))
    assert again.replay.extension.holds is True


def test_case_31_two_turns_in_a_row_that_were_thrown_away_are_put_back(talk: Start) -> None:
    told = talk("mine")
    for number in range(3):
        told.asks(f"do it {number}")
        built = told.send([message for message in told.messages if message.role != "assistant"])
        assert_whole(told, built)
        told.says(f"thoughts {number}", "no", sent=[m for m in told.messages if m.role != "assistant"])


def test_case_31_in_a_nameless_session_the_thrown_away_turn_is_told_of(talk: Start) -> None:
    told = talk()
    told.asks("do it")
    told.says("should I call a tool?", "I would rather talk.")
    told.asks("no tool calls found")
    built = told.send([message for message in told.messages if message.role != "assistant"])
    assert built.replay.checks == (Check(1, "missing", "dropped"),)
    assert thoughts(built) == []


def test_case_31_a_compacted_history_does_not_get_its_turns_back(talk: Start) -> None:
    told = talk("mine")
    for number in range(3):
        told.asks(f"question {number}")
        told.says(f"thoughts {number}", f"answer {number}")
    questions = [message for message in told.messages if message.role == "user"]
    built = told.send([*questions, Message("user", "summary of what was said")])
    assert thoughts(built) == []
    assert set(found(built)) == {("missing", "dropped")}
    assert told.guard.mode == "repair"
    told.guard = replace(told.guard, mode="strict")
    assert thoughts(told.send([*questions, Message("user", "summary of what was said")])) == []


def test_truncated_thinking_is_made_whole(session: Talk) -> None:
    sent = [replace(m, reasoning=(m.reasoning or "")[:9]) if m.role == "assistant" else m for m in session.messages]
    built = session.send(sent)
    assert_whole(session, built)
    assert found(built) == [("repaired", "truncated")] * 3


def test_prose_that_was_left_out_beside_calls_comes_back(session: Talk) -> None:
    sent = [replace(m, content=None, reasoning=None) if m.tool_calls else m for m in session.messages]
    built = session.send(sent)
    assert_whole(session, built)
    assert found(built)[0] == ("repaired", "text")


def test_a_window_that_slides_keeps_the_thinking_of_turns_with_calls(session: Talk) -> None:
    built = session.send(session.without_thinking()[4:])
    assert thoughts(built) == ["second thoughts about it", "third thoughts about it"]


def test_a_turn_whose_text_was_edited_is_kept_as_it_was_sent(session: Talk) -> None:
    sent = [replace(m, content="Edited.") if m.tool_calls and m.content else m for m in session.messages]
    built = session.send(sent)
    assert found(built)[0] == ("foreign", "edited")
    turn = built.request.messages[1]
    assert (turn.content, turn.reasoning, turn.recorded_ids) == ("Edited.", "first thoughts about it", None)


def test_an_edited_turn_without_thinking_gets_its_own_back(session: Talk) -> None:
    sent = [replace(m, content="Edited.", reasoning=None) if m.content == "I look." else m for m in session.messages]
    built = session.send(sent)
    assert found(built)[0] == ("repaired", "edited")
    turn = built.request.messages[1]
    assert (turn.content, turn.reasoning, turn.recorded_ids) == ("Edited.", "first thoughts about it", None)
