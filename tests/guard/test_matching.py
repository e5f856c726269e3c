"""How the guard tells turns apart: by evidence, across sessions, restarts and forgotten turns."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from agent_runtime.guard.prompt import HistoryGuard
from agent_runtime.guard.repair import is_filler
from agent_runtime.guard.verdict import HistoryNotIntact
from agent_runtime.ledger.turns import TurnIndex
from k3_sglang.chat.types import Message
from tests.guard.conftest import Talk, call
from tests.guard.test_client_cases import assert_whole, found, thoughts

Start = Callable[..., Talk]


def opened(told: Talk, thought: str, content: str = "Hello.") -> Talk:
    """The session after the opening that all of these share."""
    told.asks("hi")
    told.says(thought, content)
    told.asks("go on")
    return told


def test_the_turn_that_follows_tells_which_of_two_openings_it_was(talk: Start) -> None:
    sessions = [opened(talk(), f"thoughts {number}") for number in range(2)]
    for number, told in enumerate(sessions):
        told.says(f"more of {number}", f"answer {number}")
        told.asks("and?")
    for told in sessions:
        assert_whole(told, told.send(told.without_thinking()))


def test_the_turn_before_tells_which_of_two_followers_it_is(talk: Start) -> None:
    first, second = talk(), talk()
    for number, told in enumerate((first, second)):
        told.asks("hi")
        told.says(f"thoughts {number}", "", (call(),))
        told.says(f"more of {number}", "Same.")
        told.asks("and?")
    for told in (first, second):
        assert_whole(told, told.send(told.without_thinking()))


def test_choices_of_one_request_are_told_apart_by_their_thinking_or_not_at_all(talk: Start) -> None:
    told = talk("named")
    told.asks("hi")
    asked = list(told.messages)
    told.says("one way", "Hello.")
    told.messages = asked
    told.says("another way", "Hello.")
    told.asks("go on")
    assert found(told.send()) == [("exact", None)]
    flagged = told.send(told.without_thinking())
    assert found(flagged) == [("missing", "ambiguous")]
    assert thoughts(flagged) == [None]


def test_another_session_of_the_same_opening_gives_nothing_away(talk: Start) -> None:
    mine = opened(talk("mine"), "my thoughts")
    for name in ("yours", ""):
        other = replace(mine, name=name)
        assert found(other.send(mine.without_thinking())) == [("missing", "unknown")]
        assert found(other.send()) == [("exact", None)], "who has the thinking has it from here"


def test_a_named_session_is_found_though_its_system_text_changes(talk: Start) -> None:
    told = talk("mine")
    told.messages.append(Message("system", "It is 10:30."))
    opened(told, "my thoughts")
    sent = [Message("system", "It is 10:31."), *told.without_thinking()[1:]]
    assert thoughts(told.send(sent)) == ["my thoughts"]
    nameless = talk()
    nameless.messages.append(Message("system", "It is 11:30."))
    opened(nameless, "my thoughts")
    sent = [Message("system", "It is 11:31."), *nameless.without_thinking()[1:]]
    assert found(nameless.send(sent)) == [("missing", "unknown")]


def test_calls_lead_to_their_turns_whatever_moved_before_them(talk: Start) -> None:
    told = talk()
    told.messages.append(Message("system", "It is 10:30."))
    told.asks("hi")
    told.says("first thoughts", "", (call(),))
    told.says("second thoughts", "Done.")
    told.asks("go on")
    sent = [Message("system", "It is 10:31."), Message("user", "new"), *told.without_thinking()[2:]]
    assert thoughts(told.send(sent, tools=(), effort="low")) == ["first thoughts", "second thoughts"]


def test_a_forgotten_turn_is_missing_though_another_stands_where_it_stood(talk: Start) -> None:
    small = replace(talk("x").guard, index=TurnIndex(100_000, 2))
    first, second = (replace(talk(), guard=small) for _ in range(2))
    opened(first, "thoughts of the first")
    opened(second, "thoughts of the second")
    third = replace(talk(), guard=small)
    third.asks("something else")
    third.says("other", "other")
    assert len(small.index) == 2
    assert found(first.send(first.without_thinking())) == [("missing", "ambiguous")]
    assert found(second.send()) == [("exact", None)]


def test_a_history_cut_at_its_head_is_not_taken_for_a_young_one(talk: Start) -> None:
    old, young = talk(), talk()
    old.asks("before")
    old.says("at first", "Before.")
    opened(old, "thoughts of the old")
    opened(young, "thoughts of the young")
    assert found(old.send(old.without_thinking()[2:])) == [("missing", "ambiguous")]


def test_ids_made_here_that_are_not_known_any_more_lead_nowhere(talk: Start) -> None:
    told = talk()
    told.asks("hi")
    told.says("thoughts", "", (call(),))
    twin = [replace(m, tool_calls=(call(),)) if m.role == "assistant" else m for m in told.without_thinking()]
    twin[2] = replace(twin[2], tool_call_id=twin[1].tool_calls[0].id)
    assert found(told.send(twin)) == [("missing", "unknown")]


def test_turning_thinking_off_is_told_of_and_not_refused(talk: Start) -> None:
    told = opened(talk("mine", mode="strict"), "my thoughts")
    built = told.send(thinking=False, effort=None)
    assert found(built) == [("missing", "thinking_off")]
    with pytest.raises(HistoryNotIntact, match=r"messages\[1\]: its thinking is not there"):
        told.send(told.without_thinking())


def test_the_first_request_is_new(guard: HistoryGuard, talk: Start) -> None:
    told = talk()
    told.asks("hi")
    built = told.send()
    assert built.replay.verdict == "new"
    assert built.replay.extension.holds is None


@pytest.mark.parametrize("text", [".", "...", "—", "(none)", "[redacted]", "Thinking...", "n/a"])
def test_fillers_are_known(text: str) -> None:
    assert is_filler(text)


@pytest.mark.parametrize("text", ["ok", "I think.", "思考", "no, none of these", "Thinking about none of it"])
def test_short_thinking_is_no_filler(text: str) -> None:
    assert not is_filler(text)
