"""The plan of a compression is pure, splits nothing, and keeps what it says."""

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from agent_runtime.compression.plan import NothingToCompress, Plan, make_plan, units
from agent_runtime.compression.trigger import CompressionSettings
from agent_runtime.compression.users import cut_text, keep_user_texts
from agent_runtime.conversation import Conversation, Message
from tests.compression.histories import SYSTEM, histories, made, user, work

SETTINGS = CompressionSettings(user_tokens=30, user_head_tokens=10)


def plan(messages: list[Message], settings: CompressionSettings = SETTINGS, fraction: float = 1.0) -> Plan:
    made_plan = make_plan(messages, (), settings, len, fraction=fraction)
    assert isinstance(made_plan, Plan), made_plan
    return made_plan


@given(histories(), st.integers(0, 3), st.sampled_from([1.0, 0.7, 0.5, 0.35]))
def test_no_plan_splits_a_call_from_its_result_or_a_turn_from_its_thinking(
    messages: list[Message], keep_turns: int, fraction: float
) -> None:
    before = list(messages)
    settings = replace(SETTINGS, keep_turns=keep_turns)
    found = make_plan(messages, (), settings, len, fraction=fraction)
    assert messages == before and found == make_plan(messages, (), settings, len, fraction=fraction), "pure"
    if isinstance(found, NothingToCompress):
        return
    borders = {0, *(unit.end for unit in units(messages))}
    assert found.seen in borders and found.tail in borders and found.tail <= found.seen
    assert Conversation(messages[: found.seen]).open_calls == ()
    after = [*(messages[i] for i in found.system), *(user(text) for text in found.users), user("summary")]
    rest = Conversation([*after, *messages[found.tail :]])
    assert rest.open_calls == Conversation(messages).open_calls
    dropped = {message.role for i, message in enumerate(messages[: found.tail]) if i not in found.system}
    assert "assistant" in dropped, "a plan that drops no turn is none"


@given(histories())
def test_units_cover_the_history_and_only_the_last_may_be_open(messages: list[Message]) -> None:
    found = units(messages)
    assert [i for unit in found for i in range(unit.start, unit.end)] == list(range(len(messages)))
    assert all(unit.closed for unit in found[:-1])
    assert all(unit.closed for unit in found) == (Conversation(messages).open_calls == ())


def test_system_text_and_declarations_stay_as_they_are_and_users_word_for_word() -> None:
    declared = Message(role="system", tools=({"type": "function"},))
    messages = [SYSTEM, user("one"), *made("a-", "r"), declared, user("two"), *made("b-", "r")]
    found = plan(messages)
    assert [messages[i] for i in found.system] == [SYSTEM, declared]
    assert found.users == ("one", "two") and found.seen == found.tail == len(messages)
    assert found.elided_tokens == 0


def test_calls_in_flight_are_carried_and_not_summarised() -> None:
    flight = made("open-", "1", "2", "3", "4")[:3]
    messages = [*work(2), *flight]
    found = plan(messages)
    assert found.seen == found.tail == len(work(2))
    assert messages[found.tail :] == flight


def test_a_batch_of_four_calls_is_one_unit_wherever_a_part_of_the_history_ends() -> None:
    messages = [SYSTEM, user("task"), *made("a-", "r"), *made("b-", *"1234")]
    for percent in range(1, 100):
        found = make_plan(messages, (), SETTINGS, len, fraction=percent / 100)
        if isinstance(found, Plan):
            assert found.seen in (4, len(messages))


def test_the_last_turns_are_kept_whole_with_what_the_user_said_between() -> None:
    messages = [SYSTEM, user("one"), *made("a-", "r"), *made("b-", "r"), user("two"), *made("c-", "r")]
    found = plan(messages, replace(SETTINGS, keep_turns=2))
    assert messages[found.tail].tool_calls[0].id == "b-0" and found.seen == len(messages)
    assert found.users == ("one",)
    assert isinstance(make_plan(messages, (), replace(SETTINGS, keep_turns=3), len), NothingToCompress)


def test_the_last_summary_is_replaced_and_not_kept_beside_the_next() -> None:
    messages = [SYSTEM, user("task"), user("old summary"), *made("a-", "r"), user("go on")]
    found = make_plan(messages, {2}, SETTINGS, len)
    assert isinstance(found, Plan) and found.users == ("task", "go on")


def test_without_a_turn_there_is_nothing_to_compress() -> None:
    assert isinstance(make_plan([SYSTEM, user("task"), user("summary")], {2}, SETTINGS, len), NothingToCompress)
    assert isinstance(make_plan([], (), SETTINGS, len), NothingToCompress)


def test_user_texts_over_the_budget_keep_the_oldest_start_and_the_newest_end() -> None:
    kept = keep_user_texts(["0123456789abc", "gone", "newest text!"], 5, 15, len)
    assert kept.texts == ("01234", "west text!")
    assert kept.elided_after == 1 and kept.elided_tokens == 13 + 4 + 12 - 15


def test_one_long_text_keeps_its_start_and_its_end_once() -> None:
    kept = keep_user_texts(["abcdefghij"], 3, 7, len)
    assert kept.texts == ("abc", "ghij") and kept.elided_tokens == 3


@given(st.lists(st.text(min_size=1, max_size=20), max_size=8), st.integers(0, 20), st.integers(0, 30))
@example(["aa", " "], 1, 2)
def test_kept_user_texts_stay_within_the_budget_and_in_order(texts: list[str], head: int, more: int) -> None:
    kept = keep_user_texts(texts, head, head + more, len)
    assert sum(map(len, kept.texts)) <= max(head + more, 0)
    whole = "".join(texts)
    position = 0
    for text in kept.texts:
        position = whole.find(text, position)
        assert position >= 0, "every kept text is a piece of what was said, in order"
        position += len(text)
    if sum(map(len, texts)) <= head + more:
        assert kept.texts == tuple(texts) and kept.elided_tokens == 0
    else:
        assert kept.elided_tokens > 0


def test_a_cut_never_exceeds_the_budget_with_a_real_tokenizer_like_size() -> None:
    def pairs(text: str) -> int:
        return (len(text) + 1) // 2

    assert cut_text("abcdefg", 2, "start", pairs) == "abcd" and cut_text("abcdefg", 2, "end", pairs) == "defg"
    assert cut_text("abc", 0, "start", pairs) == ""
