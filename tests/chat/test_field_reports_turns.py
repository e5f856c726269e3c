"""Turns that broke other K3 servers (field reports B14-B28), parsed in every way"""

from k3_sglang.chat.parse import TurnParser
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Segment
from tests.chat.spoken import CLOSE, END, argument, arguments_of, call, closed, complete, opened, tools


def test_a_whole_turn_of_all_channels(parse_every_way) -> None:
    text = "Plan." + closed("think") + opened("response") + "Hi." + closed("response")
    text += (
        tools(call("get_weather", argument("city", "Oslo"), argument("days", "3", "number"))) + closed("message") + END
    )
    turn = parse_every_way(text, reason="stop")
    assert (turn.reasoning, turn.content, turn.finished, turn.warnings) == ("Plan.", "Hi.", True, ())
    assert arguments_of(turn) == [{"city": "Oslo", "days": 3}]
    assert complete(turn) == [True]


def test_the_end_marker_may_have_been_kept_by_the_engine(parse_every_way) -> None:
    text = closed("think") + opened("response") + "Hi." + closed("response") + closed("message")
    assert parse_every_way(text, reason="stop").finished
    assert not parse_every_way(text, reason="length").finished


class TestB14CutThinking:
    def test_b14_with_thinking_all_is_reasoning(self, parse_every_way) -> None:
        turn = parse_every_way("We need to count the colourings")
        assert (turn.reasoning, turn.content) == ("We need to count the colourings", "")

    def test_b14_without_thinking_all_is_content(self, parse_every_way) -> None:
        turn = parse_every_way("We need to count the colourings", start="response")
        assert (turn.reasoning, turn.content) == ("", "We need to count the colourings")


class TestB15ShortOrMissingThinkClose:
    def test_b15_tools_may_follow_the_thinking_directly(self, parse_every_way) -> None:
        turn = parse_every_way("I should read it." + tools(call("get_weather", argument("city", "Oslo"))))
        assert (turn.reasoning, turn.content) == ("I should read it.", "")
        assert complete(turn) == [True]

    def test_b15_a_think_close_without_separator_before_the_response(self, parse_every_way) -> None:
        turn = parse_every_way(
            f"Both are back.{CLOSE}think{opened('response')}B is larger.{closed('response')}{closed('message')}"
        )
        assert (turn.reasoning, turn.content) == ("Both are back.", "B is larger.")
        assert turn.warnings == ("separator_missing",)

    def test_b15_a_think_close_without_separator_before_text(self, parse_every_way) -> None:
        turn = parse_every_way(f"Both are back.{CLOSE}thinkThe answer is B.")
        assert (turn.reasoning, turn.content) == ("Both are back.", "The answer is B.")

    def test_b15_a_response_may_follow_the_thinking_without_a_close(self, parse_every_way) -> None:
        turn = parse_every_way("Hm." + opened("response") + "Yes." + closed("response"))
        assert (turn.reasoning, turn.content) == ("Hm.", "Yes.")


class TestB16TheChannelIsOpenedAgain:
    def test_b16_a_repeated_open_is_ignored(self, parse_every_way) -> None:
        turn = parse_every_way(opened("think") + "Plan." + closed("think") + opened("response") + "Hi.")
        assert (turn.reasoning, turn.content) == ("Plan.", "Hi.")

    def test_b16_spelled_in_ordinary_tokens_it_is_thought_and_never_answer(self, toy: K3Tokenizer) -> None:
        parser = TurnParser(toy, start="think")
        parser.feed(toy.encode_text(opened("think") + "Plan."))
        parser.feed(toy.encode_segments([Segment(closed("think") + opened("response") + "Hi.", True)]))
        parser.finish("length")
        assert (parser.turn.reasoning, parser.turn.content) == (opened("think") + "Plan.", "Hi.")


class TestB19TheStartChannelComesFromThePrompt:
    def test_b19_a_fresh_turn_starts_in_thinking_whatever_the_history_holds(self) -> None:
        history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "r"}]
        assert parse_request({"messages": [*history, {"role": "user", "content": "c"}]}).start == "think"

    def test_b19_and_is_parsed_from_there(self, parse_every_way) -> None:
        turn = parse_every_way("Hmm." + closed("think") + opened("response") + "Yes.")
        assert (turn.reasoning, turn.content) == ("Hmm.", "Yes.")

    def test_b19_a_turn_continued_in_its_response_is_content(self, parse_every_way) -> None:
        turn = parse_every_way(" and more." + closed("response") + closed("message") + END, start="response")
        assert (turn.reasoning, turn.content, turn.finished) == ("", " and more.", True)


class TestB21Case9TheAnswerIsInTheThinkChannel:
    def test_b21_case09_it_stays_reasoning_and_is_flagged(self, parse_every_way) -> None:
        turn = parse_every_way("The answer is 4." + closed("response") + closed("message") + END, reason="stop")
        assert (turn.reasoning, turn.content) == ("The answer is 4.", "")
        assert turn.warnings == ("response_closed_in_think",)


class TestB26ConstrainedJsonWithoutAResponseChannel:
    def test_b26_the_json_is_the_content(self, parse_every_way) -> None:
        turn = parse_every_way("Name and age are missing." + closed("think") + '{"reply":"no text given"}')
        assert (turn.reasoning, turn.content) == ("Name and age are missing.", '{"reply":"no text given"}')

    def test_b26_truncated_thinking_claims_no_json(self, parse_every_way) -> None:
        assert parse_every_way('Name {"reply": 1}' + f"{CLOSE}thi").content == ""


class TestB28ControlTokensOfTheModel:
    def test_b28_a_pad_ends_the_turn_and_is_never_text(self, toy: K3Tokenizer) -> None:
        parser = TurnParser(toy, start="response")
        parser.feed([*toy.encode_text("ab"), toy.special.pad, *toy.encode_text("cd")])
        assert parser.done
        parser.finish("stop")
        assert (parser.turn.content, parser.turn.finished) == ("ab", False)
        assert parser.turn.warnings == ("control_token", "output_after_end")

    def test_b28_spelled_markers_in_ordinary_tokens_are_text(self, toy: K3Tokenizer) -> None:
        quoted = "use <|close|>argument<|sep|> and <|end_of_msg|>"
        parts = [
            Segment(closed("think") + opened("response"), True),
            Segment(quoted),
            Segment(closed("response") + opened("tools") + opened('call tool="f" index="1"'), True),
            Segment(opened('argument key="x" type="string"'), True),
            Segment(quoted),
            Segment(closed("argument") + closed("call") + closed("tools") + closed("message") + END, True),
        ]
        parser = TurnParser(toy, start="think")
        parser.feed([*toy.encode_text(quoted), *toy.encode_segments(parts)])
        parser.finish("stop")
        turn = parser.turn
        assert (turn.reasoning, turn.content, turn.warnings) == (quoted, quoted, ())
        assert arguments_of(turn) == [{"x": quoted}]
