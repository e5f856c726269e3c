"""A compression and everything that can go wrong in it: no split pair, no loop, a bounded number of calls."""

import asyncio
from collections.abc import Sequence

import pytest

from agent_runtime.compression.count import EncoderMeter
from agent_runtime.compression.run import Compressor
from agent_runtime.compression.trigger import CompressionSettings
from agent_runtime.conversation import AssistantTurn, Conversation, Message, Usage
from agent_runtime.engine.chat_errors import (
    ContextOverflow,
    EndpointFailed,
    EndpointUnreachable,
    RequestRefused,
    StreamBroken,
)
from agent_runtime.events import CompressionFinished, CompressionStarted, Event
from agent_runtime.history import History
from agent_runtime.replay import replay
from agent_runtime.resume import recover
from tests.agent.scripted_model import Line, ScriptedModel, Seen, turn
from tests.compression.histories import SYSTEM, TOOLS, begun, compressor, made, user, work
from tests.gateway.vocabulary import byte_tokenizer

TIGHT = CompressionSettings(trigger_tokens=100, backoff_s=0.0)


def overflow() -> ContextOverflow:
    return ContextOverflow("too long", status=400, code="context_length_exceeded", param="messages")


def valid(history: History) -> None:
    """The window is a conversation, the log gives every request and the session again."""
    Conversation(history.conversation.messages)
    assert all(request.exact for request in replay(history.store.entries()))
    again = recover(history.store.entries()).history(history.store)
    assert again.conversation.messages == history.conversation.messages
    assert again.window == history.window and again.logged_messages == history.logged_messages


async def compressed(
    *script: Line, messages: Sequence[Message] = (), settings: CompressionSettings = TIGHT
) -> tuple[CompressionFinished, ScriptedModel, History]:
    model, history = ScriptedModel(list(script)), begun(*(messages or work()))
    finished = await compressor(model, history, settings).compress()
    valid(history)
    return finished, model, history


async def test_the_summary_call_is_the_same_prompt_with_only_the_instruction_new() -> None:
    finished, model, _ = await compressed(turn("SUMMARY", usage=Usage(120, 9, 100)))
    (seen,) = model.seen
    assert seen.messages[:-1] == tuple(work()) and list(seen.tools) == TOOLS
    assert seen.messages[-1].role == "user"
    assert seen.options.tool_choice == "none" and seen.options.max_output_tokens == 32_768
    assert finished.outcome == "compressed" and finished.calls == 1
    assert [usage.cached_tokens for usage in finished.summary_usage] == [100]


async def test_the_next_window_is_system_text_user_messages_and_summary() -> None:
    _, _, history = await compressed(turn("SUMMARY", reasoning="of the summariser"))
    system, task, note = history.conversation.messages
    assert (system, task) == (SYSTEM, user("task"))
    assert note.role == "user" and str(note.content).endswith("SUMMARY")
    assert history.window.synthetic == {2} and history.window.number == 1
    assert "of the summariser" not in str(history.conversation.messages)


async def test_the_last_turns_can_be_kept_with_their_thinking() -> None:
    settings = CompressionSettings(trigger_tokens=100, keep_turns=1)
    _, model, history = await compressed(turn("SUMMARY"), settings=settings)
    assert history.conversation.messages[3:] == tuple(work()[-3:])
    assert model.seen[0].messages[:-1] == tuple(work()), "the summary is made of all of it"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (turn("half a summ", finish="length"), "the summary was cut off (length)"),
        (turn("half a summ", finish="content_filter"), "cut off (content_filter)"),
        (turn("", reasoning="only thinking"), "the summary was empty"),
        (turn("", reasoning=""), "the summary was empty"),
        (turn(" \n"), "the summary was empty"),
        (turn("let me", ("look", "{}")), "called a tool instead"),
        (StreamBroken("went silent"), "the endpoint failed: went silent"),
        (EndpointFailed("503", status=503), "the endpoint failed: 503"),
    ],
    ids=["truncated", "filtered", "thinking-only", "nothing", "blank", "called", "broken", "server-error"],
)
async def test_a_summary_that_is_none_is_asked_for_again_within_a_bound(
    bad: AssistantTurn | Exception, words: str
) -> None:
    finished, model, history = await compressed(bad, turn("SUMMARY"))
    assert finished.outcome == "compressed" and finished.calls == 2
    assert model.seen[0].messages[:-1] == model.seen[1].messages[:-1], "the same prefix again"
    failed, model, history = await compressed(bad)
    assert failed.outcome == "failed" and failed.calls == len(model.seen) == TIGHT.max_calls
    assert words in failed.reason
    assert history.conversation.messages == tuple(work()), "nothing was changed"


async def test_after_a_truncated_summary_a_shorter_one_is_asked_for() -> None:
    _, model, _ = await compressed(turn("half", finish="length"), turn("SUMMARY"))
    assert "cut off at the output limit" in str(model.seen[1].messages[-1].content)


async def test_when_the_history_does_not_fit_a_shorter_start_is_summarised_and_the_rest_carried() -> None:
    finished, model, history = await compressed(overflow(), turn("SUMMARY"), messages=work(10))
    assert finished.outcome == "compressed" and finished.calls == 2
    first, second = (len(seen.messages) - 1 for seen in model.seen)
    assert second < first and model.seen[1].messages[:second] == model.seen[0].messages[:second]
    assert history.conversation.messages[3:] == tuple(work(10)[second:])


async def test_an_endpoint_that_always_overflows_is_asked_four_times_and_no_more() -> None:
    failed, model, history = await compressed(overflow(), messages=work(10))
    assert failed.outcome == "failed" and len(model.seen) == 4 and "given up" in failed.reason
    assert history.conversation.messages == tuple(work(10))


@pytest.mark.parametrize(
    "error",
    [
        RequestRefused("no", status=400, code=None, param=None),
        EndpointUnreachable("http://nowhere", 3, "refused"),
    ],
)
async def test_a_refusal_is_not_repeated(error: Exception) -> None:
    failed, model, _ = await compressed(error)
    assert failed.outcome == "failed" and len(model.seen) == 1 and "given up, the endpoint refused" in failed.reason


async def test_a_history_that_leaves_no_room_for_a_summary_is_cut_before_anybody_is_asked() -> None:
    history, model = begun(*work(60)), ScriptedModel([turn("SUMMARY")])
    meter = EncoderMeter(byte_tokenizer())
    size = meter.count(history.conversation.messages, TOOLS)
    assert size is not None
    settings = CompressionSettings(trigger_tokens=1000, window_tokens=size + 500, summary_tokens=2000)
    finished = await compressor(model, history, settings, meter).compress()
    assert finished.outcome == "compressed" and len(model.seen) == 1
    assert len(model.seen[0].messages) < len(work(60))
    room = model.seen[0].options.max_output_tokens
    sent = meter.count(model.seen[0].messages, TOOLS)
    assert room is not None and sent is not None and sent + room <= size + 500
    valid(history)


async def test_what_is_appended_while_the_summary_is_made_is_carried_over() -> None:
    history = begun(*work())

    def growing(seen: Seen) -> AssistantTurn:
        for message in made("late-", "r"):
            history.append(message)
        return turn("SUMMARY")

    finished = await compressor(ScriptedModel([growing]), history).compress()
    assert finished.outcome == "compressed" and finished.calls == 1, "growth is no reason to start again"
    assert history.conversation.messages[3:] == tuple(made("late-", "r"))
    valid(history)


async def test_a_call_in_flight_is_carried_and_gets_its_result_in_the_next_window() -> None:
    flight = made("open-", "1", "2", "3", "4")
    history = begun(*work(), *flight[:3])
    model = ScriptedModel([turn("SUMMARY")])
    await compressor(model, history).compress()
    assert model.seen[0].messages[:-1] == tuple(work())
    assert [call.id for call in history.conversation.open_calls] == ["open-2", "open-3"]
    for message in flight[3:]:
        history.append(message)
    assert history.conversation.messages[3:] == tuple(flight)
    valid(history)


async def test_a_result_that_arrives_while_the_summary_is_made_is_not_lost() -> None:
    flight = made("open-", "1", "2")
    history = begun(*work(), *flight[:2])

    def arrives(seen: Seen) -> AssistantTurn:
        history.append(flight[2])
        return turn("SUMMARY")

    await compressor(ScriptedModel([arrives]), history).compress()
    assert history.conversation.messages[3:] == tuple(flight) and history.conversation.open_calls == ()
    valid(history)


async def test_a_cancelled_compression_leaves_everything_as_it_was_and_can_be_made_later() -> None:
    history, asked = begun(*work()), asyncio.Event()

    async def hangs(seen: Seen) -> AssistantTurn:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    worker = compressor(ScriptedModel([hangs, turn("SUMMARY")]), history)
    task = asyncio.create_task(worker.compress())
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert history.conversation.messages == tuple(work())
    valid(history)
    assert (await worker.compress()).outcome == "compressed"


async def test_case26_callers_at_the_same_time_share_one_compression() -> None:
    async def slow(seen: Seen) -> AssistantTurn:
        await asyncio.sleep(0)  # lets the others come in
        return turn("SUMMARY")

    history, model = begun(*work()), ScriptedModel([slow])
    worker = compressor(model, history)
    first, *others = await asyncio.gather(*(worker.compress() for _ in range(5)))
    assert len(model.seen) == 1 and first.calls == 1 and history.window.number == 1
    assert all(other.outcome == "compressed" and other.calls == 0 for other in others)


async def test_a_second_compression_replaces_the_first_summary_which_it_has_seen() -> None:
    history, model = begun(*work()), ScriptedModel([turn("FIRST"), turn("SECOND")])
    worker = compressor(model, history)
    await worker.compress()
    for message in (user("and now?"), *made("u-", "r")):
        history.append(message)
    await worker.compress()
    assert "FIRST" in str(model.seen[1].messages) and "FIRST" not in str(history.conversation.messages)
    assert [m.content for m in history.conversation.messages[:3]] == ["be good", "task", "and now?"]
    assert str(history.conversation.messages[3].content).endswith("SECOND") and history.window.number == 2
    valid(history)


async def test_a_second_compression_with_nothing_new_says_so_and_asks_nobody() -> None:
    history, model = begun(*work()), ScriptedModel([turn("FIRST")])
    worker, events = compressor(model, history), list[Event]()
    await worker.compress()
    again = await worker.compress(events.append)
    assert again.outcome == "nothing" and len(model.seen) == 1 and again.calls == 0
    assert "no complete turn in 3 messages" in again.reason and "trigger 100" in again.reason
    assert [type(event) for event in events] == [CompressionStarted, CompressionFinished]


async def test_left_out_user_messages_are_counted_over_all_windows() -> None:
    settings = CompressionSettings(trigger_tokens=100, user_tokens=20, user_head_tokens=5)
    history, model = begun(SYSTEM, user("a" * 50), *made("a-", "r")), ScriptedModel([turn("S")])
    worker = compressor(model, history, settings)
    await worker.compress()
    texts = [str(m.content) for m in history.conversation.messages]
    assert texts[1:4] == ["aaaaa", "[30 tokens of earlier user messages are left out here.]", "a" * 15]
    for message in (user("b" * 20), *made("b-", "r")):
        history.append(message)
    await worker.compress()
    texts = [str(m.content) for m in history.conversation.messages]
    assert texts[1:4] == ["aaaaa", "[50 tokens of earlier user messages are left out here.]", "b" * 15]
    valid(history)


async def test_what_the_program_knows_exactly_and_the_way_back_stand_behind_the_summary() -> None:
    history = begun(*work())
    worker = Compressor(
        ScriptedModel([turn("SUMMARY")]),
        history,
        EncoderMeter(byte_tokenizer()),
        TIGHT,
        tools=TOOLS,
        attachments=lambda: ["Plan:\n1. [ ] look"],
        recovery_tool="read_history",
    )
    finished = await worker.compress()
    note = str(history.conversation.messages[-1].content)
    assert note.index("SUMMARY") < note.index("1. [ ] look") < note.index("messages 1 to 11 of this session")
    assert "read_history" in note
    assert finished.after_tokens == EncoderMeter(byte_tokenizer()).count(history.conversation.messages, TOOLS)
    assert finished.before_tokens is not None and finished.after_tokens is not None


async def test_a_hundred_compressions_with_growth_between_stay_bounded() -> None:
    """Every window is a valid conversation, no summary piles up, one call each."""
    history, model = begun(SYSTEM, user("task")), ScriptedModel([turn("S")])
    worker = compressor(model, history)
    for number in range(100):
        for message in made(f"t{number}-", *"1234"):
            history.append(message)
        assert (await worker.compress()).outcome == "compressed"
        assert len(history.conversation) == 3
    assert len(model.seen) == 100
    valid(history)
