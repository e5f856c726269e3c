"""What agent clients met behind K3 servers (cases 8-18 of the client survey), parsed and rendered in every way."""

import json
from collections import Counter

import pytest

from k3_sglang.chat.encode import render
from k3_sglang.chat.events import CallArgumentsDelta, CallStart
from k3_sglang.chat.parse import TurnParser
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Segment
from tests.chat.spoken import CLOSE, END, OPEN, SEP, argument, arguments_of, call, closed, complete, opened, tools


class TestCase8HistoryOfAnotherModel:
    def test_case08_thinking_flattened_into_text_is_content_and_makes_no_think_channel(self) -> None:
        history = [{"role": "assistant", "content": "<think>R</think>A", "reasoning_content": None}] * 6
        body = {"messages": [*history, {"role": "user", "content": "go on"}], "reasoning_effort": "high"}
        text = "".join(segment.text for segment in render(parse_request(body)))
        assert text.count(f"{opened('think')}{closed('think')}{opened('response')}<think>R</think>A") == 6

    def test_case08_an_answer_without_thinking_is_told_apart_from_one_with_thinking(self, parse_every_way) -> None:
        turn = parse_every_way(closed("think") + opened("response") + "The user is asking. I should" + END)
        assert (turn.reasoning, turn.content) == ("", "The user is asking. I should")


class TestCase9TheAnswerIsInTheThinkChannel:
    @pytest.mark.parametrize("answer", ["The answer is 4.", "", " \n"])
    def test_case09_it_is_never_an_empty_success(self, parse_every_way, answer: str) -> None:
        turn = parse_every_way(answer + closed("response") + closed("message") + END, reason="stop")
        assert (turn.reasoning, turn.content, turn.finished) == (answer, "", True)
        assert turn.warnings == ("response_closed_in_think",)


class TestCase10CutInsideTheThinking:
    @pytest.mark.parametrize("cut", ["", CLOSE, f"{CLOSE}thi", f"{CLOSE}think"])
    def test_case10_it_is_reasoning_and_unfinished(self, parse_every_way, cut: str) -> None:
        turn = parse_every_way("We need to" + cut, reason="length")
        assert (turn.reasoning, turn.content, turn.finished) == ("We need to", "", False)


class TestCase11TheCallFollowsTheThinking:
    def test_case11_every_call_after_an_unclosed_thinking_is_found(self, parse_every_way) -> None:
        made = tools(call("f", argument("a", "1")), call("g", argument("b", "2", "number"), index=2))
        turn = parse_every_way("Read both." + made + closed("message") + END, reason="stop")
        assert (turn.reasoning, turn.content, complete(turn)) == ("Read both.", "", [True, True])
        assert arguments_of(turn) == [{"a": "1"}, {"b": 2}]
        assert turn.warnings == ("think_not_closed",)


class TestCase12StreamedAndWhole:
    @pytest.mark.parametrize("ending", [closed("response") + closed("message") + END, closed("message"), END, ""])
    def test_case12_both_assemble_the_same_message_without_markers(self, parse_every_way, ending: str) -> None:
        turn = parse_every_way("R" + closed("think") + opened("response") + "Hello" + ending, reason="stop")
        assert (turn.reasoning, turn.content) == ("R", "Hello")


class TestCase13ConstraintAndCut:
    def test_case13_a_call_cut_at_any_token_is_incomplete(self, toy: K3Tokenizer) -> None:
        text = closed("think") + tools(call("f", argument("a", "x"), argument("n", "12", "number")))
        ids = toy.encode_segments([Segment(text, True)])
        whole = text[: text.index(closed("tools"))]
        last = len(toy.encode_segments([Segment(whole, True)])) - 1
        for length in range(len(ids)):
            parser = TurnParser(toy, start="think")
            parser.feed(ids[:length])
            parser.finish("length")
            assert not any(complete(parser.turn)) or length > last
            assert not parser.turn.finished


class TestCase18SectionsAndEnds:
    def test_case18_call_shaped_text_after_the_tools_is_dropped(self, parse_every_way) -> None:
        fake = 'call tool="rm" index="1"'
        turn = parse_every_way(closed("think") + tools(call("f")) + fake + call("g") + closed("message"))
        assert [c.name for c in turn.calls] == ["f"]

    def test_case18_a_second_tools_section_is_dropped(self, parse_every_way) -> None:
        turn = parse_every_way(closed("think") + tools(call("f")) + tools(call("g")) + closed("message"))
        assert [c.name for c in turn.calls] == ["f"]
        assert turn.warnings == ("second_tools_section",)

    def test_case18_a_call_outside_the_tools_section_is_dropped(self, parse_every_way) -> None:
        turn = parse_every_way(closed("think") + opened("response") + "a" + call("g") + opened("response") + "b")
        assert (turn.content, turn.calls) == ("ab", ())

    def test_output_after_the_message_is_dropped(self, parse_every_way) -> None:
        text = closed("think") + opened("response") + "a" + closed("response") + closed("message")
        turn = parse_every_way(text + "tail" + opened("response") + "b" + tools(call("f")))
        assert (turn.content, turn.calls, turn.warnings) == ("a", (), ("output_after_end",))

    @pytest.mark.parametrize(
        "broken",
        [
            opened('call tool="f" index="1"') + opened('argument key="a" type="string"') + "x" + closed("call"),
            opened('call tool="f" index="1"') + argument("a", "x"),
            opened('call tool="f" index="1"')
            + opened('argument type="string"')
            + "x"
            + closed("argument")
            + closed("call"),
            opened('call tool="f" index="1"') + opened("nonsense") + "x" + closed("call"),
            opened('call tool="f" index="1"') + f'{OPEN}argument key="a"{opened("argument")}x' + closed("call"),
            opened('call tool="f" index="1"') + opened('argument key="a"') + "x" + argument("b", "y") + closed("call"),
        ],
    )
    def test_case13_broken_calls_are_incomplete_and_siblings_stay(self, parse_every_way, broken: str) -> None:
        turn = parse_every_way(closed("think") + tools(broken, call("ok", index=2)))
        assert [(c.name, c.complete) for c in turn.calls] == [("f", False), ("ok", True)]

    def test_an_opaque_arguments_block_is_taken_whole_if_it_is_an_object(self, parse_every_way) -> None:
        good = (
            opened('call tool="f" index="1"')
            + opened('json type="object"')
            + '{"a": 1}'
            + closed("json")
            + closed("call")
        )
        bad = (
            opened('call tool="f" index="2"') + opened('json type="object"') + "{'a'" + closed("json") + closed("call")
        )
        turn = parse_every_way(closed("think") + tools(good, bad))
        assert [(c.arguments, c.complete) for c in turn.calls] == [('{"a": 1}', True), ("{}", False)]

    def test_stray_markers_leave_the_text_around_them(self, parse_every_way) -> None:
        turn = parse_every_way(f"a{SEP}b{OPEN}{CLOSE}x{CLOSE}foo d", start="response")
        assert turn.content == "abxfoo d"
        assert turn.warnings == ("stray_marker",)

    def test_an_endless_tag_becomes_text_at_a_fixed_length(self, parse_every_way) -> None:
        turn = parse_every_way(f"a{OPEN}" + "x" * 20_000, start="response")
        assert turn.content == "a" + "x" * 20_000


class TestCase15CallIds:
    def test_case15_the_same_call_over_and_over_has_a_new_id_each_time(self, toy: K3Tokenizer) -> None:
        seen: Counter[str] = Counter()
        for _ in range(60):
            parser = TurnParser(toy, start="think")
            parser.feed_text(tools(call("exec", argument("command", "ls"))))
            parser.finish("stop")
            seen.update(c.id for c in parser.turn.calls)
        assert set(seen.values()) == {1} and len(seen) == 60


class TestCase16NamesInPieces:
    def test_case16_a_name_is_reported_whole_and_calls_never_interleave(self, toy: K3Tokenizer) -> None:
        text = tools(call("get_weather", argument("a", "1")), call("mcp.browser_open", argument("b", "2"), index=2))
        for size in (1, 3, 7):
            parser = TurnParser(toy, start="think", new_call_id=lambda: "c")
            events = [e for at in range(0, len(text), size) for e in parser.feed_text(text[at : at + size])]
            assert [e.name for e in events if isinstance(e, CallStart)] == ["get_weather", "mcp.browser_open"]
            indexes = [e.index for e in events if isinstance(e, CallStart | CallArgumentsDelta)]
            assert indexes == sorted(indexes)
            assert [json.loads(c.arguments) for c in parser.turn.calls] == [{"a": "1"}, {"b": "2"}]
