"""Outputs that broke other K3 servers (field reports B01-B26, client cases 9-18), parsed in every way."""

import json
import time

import pytest

from k3_sglang.chat.encode import render
from k3_sglang.chat.events import CallArgumentsDelta, CallStart, ParsedTurn
from k3_sglang.chat.parse import TurnParser, new_call_id
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Segment

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"


def opened(tag: str) -> str:
    return f"{OPEN}{tag}{SEP}"


def closed(tag: str) -> str:
    return f"{CLOSE}{tag}{SEP}"


def argument(key: str, value: str, kind: str = "string") -> str:
    return opened(f'argument key="{key}" type="{kind}"') + value + closed("argument")


def call(name: str, *arguments: str, index: int = 1) -> str:
    return opened(f'call tool="{name}" index="{index}"') + "".join(arguments) + closed("call")


def tools(*calls: str) -> str:
    return opened("tools") + "".join(calls) + closed("tools")


def arguments_of(turn: ParsedTurn) -> list[dict]:
    return [json.loads(c.arguments) for c in turn.calls]


def complete(turn: ParsedTurn) -> list[bool]:
    return [c.complete for c in turn.calls]


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


class TestB01ArgumentsThatAreNoJson:
    def test_bad_values_become_strings_and_siblings_stay(self, parse_every_way) -> None:
        bad = argument("items", "- buy milk\n- call bob", "object") + argument("limit", "", "number")
        turn = parse_every_way(tools(call("todo_write", bad, argument("note", "plain"))))
        assert arguments_of(turn) == [{"items": "- buy milk\n- call bob", "limit": "", "note": "plain"}]
        assert complete(turn) == [True]
        assert "argument_not_json" in turn.warnings

    @pytest.mark.parametrize(
        ("kind", "value", "delivered"),
        [
            ("boolean", "True", "True"),
            ("null", "", ""),
            ("number", "NaN", "NaN"),
            ("number", "-Infinity", "-Infinity"),
            ("array", "[1, NaN]", "[1, NaN]"),
            ("number", "9" * 5000, "9" * 5000),
            ("array", "[" * 100_000, "[" * 100_000),
            ("object", '"text"', "text"),
            ("integer", "7", 7),
            ("number", "1e5", 1e5),
            ("object", '{"a": {"b": [1, null]}}', {"a": {"b": [1, None]}}),
            ("boolean", "\n true ", True),
        ],
    )
    def test_values_by_declared_type_with_fallback_to_text(self, parse_every_way, kind, value, delivered) -> None:
        turn = parse_every_way(tools(call("f", argument("a", value, kind))))
        assert arguments_of(turn) == [{"a": delivered}]
        assert complete(turn) == [True]

    def test_one_bad_call_keeps_its_siblings(self, parse_every_way) -> None:
        nameless = opened('call index="1"') + argument("a", "1") + closed("call")
        turn = parse_every_way(tools(nameless, call("ok", argument("a", "2"), index=2)))
        assert [(c.name, c.complete) for c in turn.calls] == [("ok", True)]
        assert turn.warnings[:2] == ("think_not_closed", "call_without_name")


class TestB02NamesAndKeysAreUnescaped:
    def test_values_are_not_unescaped(self, parse_every_way) -> None:
        turn = parse_every_way(tools(call("a&amp;b&quot;c", argument("k&quot;1", "v&2 &quot;"))))
        assert turn.calls[0].name == 'a&b"c'
        assert arguments_of(turn) == [{'k"1': "v&2 &quot;"}]

    @pytest.mark.parametrize(
        ("written", "name"), [("x&amp;quot;y", "x&quot;y"), ("a<b", "a<b"), ("my.ns.f", "my.ns.f")]
    )
    def test_odd_names_survive(self, parse_every_way, written: str, name: str) -> None:
        assert parse_every_way(tools(call(written))).calls[0].name == name

    def test_attribute_order_and_a_missing_type_do_not_matter(self, parse_every_way) -> None:
        swapped = (
            opened('call index="1" tool="f"') + opened('argument type="number" key="n"') + "1" + closed("argument")
        )
        untyped = opened('argument key="s"') + "1" + closed("argument") + closed("call")
        assert arguments_of(parse_every_way(tools(swapped + untyped))) == [{"n": 1, "s": "1"}]

    def test_rendering_what_was_parsed_renders_the_same(self, toy: K3Tokenizer) -> None:
        text = tools(call("a&amp;b", argument("k&quot;1", "v & w"), argument("n", "[1, 2]", "array")))
        parser = TurnParser(toy, start="response")
        parser.feed_text(closed("response") + text)
        parser.finish("length")
        spoken = parser.turn.calls[0]
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": spoken.name, "arguments": spoken.arguments}}],
        }
        assert text in "".join(s.text for s in render(parse_request({"messages": [message]})))


class TestB03ArgumentsStream:
    def test_the_first_delta_comes_with_the_name_and_strings_stream(self, toy: K3Tokenizer) -> None:
        content = 'line with "quotes" \\ and\ttabs\n' * 70
        text = tools(call("write_file", argument("path", "a.txt"), argument("content", content)))
        parser = TurnParser(toy, start="think", new_call_id=lambda: "c0")
        kinds: list[int] = []
        pieces = ""
        for begin in range(0, len(text), 3):
            for event in parser.feed_text(text[begin : begin + 3]):
                if isinstance(event, CallStart):
                    assert begin < text.index("argument"), "the call must start before its first argument"
                    assert (event.id, event.name) == ("c0", "write_file")
                    kinds.append(begin)
                elif isinstance(event, CallArgumentsDelta):
                    pieces += event.json
        parser.finish("length")
        assert len(kinds) == 1
        assert json.loads(pieces) == {"path": "a.txt", "content": content}

    def test_every_prefix_of_the_pieces_is_a_prefix_of_the_result(self, toy: K3Tokenizer) -> None:
        text = tools(call("f", argument("s", 'a"b\\c\n\u2028é🚀'), argument("n", '{"x": 1}', "object")))
        parser = TurnParser(toy, start="think")
        so_far, prefixes = "", []
        for char in text:
            for event in parser.feed_text(char):
                if isinstance(event, CallArgumentsDelta):
                    so_far += event.json
                    prefixes.append(so_far)
        parser.finish("length")
        assert len(prefixes) > 8
        assert all(parser.turn.calls[0].arguments.startswith(prefix) for prefix in prefixes)


class TestB04CallIds:
    def test_ids_are_unique_and_say_nothing(self, toy: K3Tokenizer) -> None:
        ids: set[str] = set()
        for _ in range(2):
            parser = TurnParser(toy, start="think")
            parser.feed_text(tools(call("list_dir"), call("list_dir", index=2)))
            parser.finish("length")
            ids |= {c.id for c in parser.turn.calls}
            assert not any("list_dir" in c.id for c in parser.turn.calls)
        assert len(ids) == 4
        assert len({new_call_id() for _ in range(1000)}) == 1000


class TestB05NoToolsDeclared:
    @pytest.mark.parametrize("cut", [None, 60, 40, 28, 24, 20])
    def test_the_tools_section_is_dropped_whole_or_cut(self, parse_every_way, cut: int | None) -> None:
        text = ("Sure." + closed("response") + tools(call("calculator", argument("expression", "37*19"))))[:cut]
        turn = parse_every_way(text, start="response", calls_allowed=False)
        assert (turn.content, turn.calls) == ("Sure.", ())


class TestB06MessageCloseIsNotContent:
    @pytest.mark.parametrize(
        "text", ["Hello" + closed("message"), "Hello<|close|>mess", "Hello<|close|>", "Hello<|clo"]
    )
    @pytest.mark.parametrize("reason", ["stop", "length"])
    def test_no_part_of_a_marker_surfaces(self, parse_every_way, text: str, reason: str) -> None:
        assert parse_every_way(text, start="response", reason=reason).content == "Hello"


class TestB08FusedTags:
    def test_nothing_is_executed_on_a_guess(self, parse_every_way) -> None:
        text = "Done." + opened('toolscall tool="StrReplace" index="1"')
        text += opened('argument key="path" type="string"') + f"src/aargument{SEP}"
        text += f"{CLOSE}call{SEP}{CLOSE}toolsmessage{SEP}"
        turn = parse_every_way(text, start="response")
        assert (turn.content, turn.calls) == ("Done.", ())
        assert "malformed_tag" in turn.warnings


class TestB09UndeclaredTools:
    def test_calls_of_unknown_tools_are_reported_in_order_for_the_runtime_to_answer(self, parse_every_way) -> None:
        turn = parse_every_way(tools(call("get_weather", argument("city", "Oslo")), call("img_gen", index=2)))
        assert [(c.name, c.complete) for c in turn.calls] == [("get_weather", True), ("img_gen", True)]


class TestB10WhiteSpaceIsKept:
    @pytest.mark.parametrize("value", ["\n    def f():\n\tpass\n", "  ", "\r\n", "a\u2028b", "🚀\x01\x7f", ""])
    def test_string_values_are_byte_exact(self, parse_every_way, value: str) -> None:
        turn = parse_every_way(tools(call("my.ns.edit-file", argument("old", value), argument("new", "  "))))
        assert turn.calls[0].name == "my.ns.edit-file"
        assert arguments_of(turn) == [{"old": value, "new": "  "}]

    def test_reasoning_and_content_keep_their_edges(self, parse_every_way) -> None:
        turn = parse_every_way(" \n a \n" + closed("think") + opened("response") + "\n b \t" + closed("response"))
        assert (turn.reasoning, turn.content) == (" \n a \n", "\n b \t")


class TestB11OneRuleForTypesAndDuplicates:
    def test_the_declared_type_decides(self, parse_every_way) -> None:
        assert arguments_of(parse_every_way(tools(call("f", argument("days", "3"))))) == [{"days": "3"}]

    def test_the_first_of_duplicate_arguments_counts(self, parse_every_way) -> None:
        twice = argument("days", "1", "number") + argument("days", "2", "number") + argument("city", "Oslo")
        turn = parse_every_way(tools(call("f", twice)))
        assert turn.calls[0].arguments == '{"days": 1, "city": "Oslo"}'
        assert complete(turn) == [True]
        assert "duplicate_argument" in turn.warnings

    def test_duplicate_keys_inside_a_value_are_not_passed_on(self, parse_every_way) -> None:
        turn = parse_every_way(tools(call("f", argument("o", '{"a": 1, "a": 2}', "object"))))
        assert turn.calls[0].arguments == '{"o": {"a": 2}}'


class TestB12CutCalls:
    def test_the_cut_call_is_incomplete_and_the_whole_one_is_kept(self, parse_every_way) -> None:
        text = opened("tools") + call("get_weather", argument("city", "Oslo"))
        text += opened('call tool="get_weather" index="2"') + opened('argument key="city" type="string"') + "Ber"
        turn = parse_every_way(text)
        assert complete(turn) == [True, False]
        assert arguments_of(turn) == [{"city": "Oslo"}, {"city": "Ber"}]
        assert not turn.finished

    @pytest.mark.parametrize("cut", range(1, 120, 4))
    def test_wherever_a_call_is_cut_its_arguments_are_json_and_it_can_be_sent_back(self, parse_every_way, cut) -> None:
        text = opened("tools") + call("f", argument("s", 'a"\\'), argument("n", "[1, 2]", "array"), argument("t", "x"))
        turn = parse_every_way(text[:-cut])
        assert not any(complete(turn)) or cut <= 0
        calls = [{"id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in turn.calls]
        render(parse_request({"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}))


class TestB14CutThinking:
    def test_with_thinking_all_is_reasoning(self, parse_every_way) -> None:
        turn = parse_every_way("We need to count the colourings")
        assert (turn.reasoning, turn.content) == ("We need to count the colourings", "")

    def test_without_thinking_all_is_content(self, parse_every_way) -> None:
        turn = parse_every_way("We need to count the colourings", start="response")
        assert (turn.reasoning, turn.content) == ("", "We need to count the colourings")


class TestB15ShortOrMissingThinkClose:
    def test_tools_may_follow_the_thinking_directly(self, parse_every_way) -> None:
        turn = parse_every_way("I should read it." + tools(call("get_weather", argument("city", "Oslo"))))
        assert (turn.reasoning, turn.content) == ("I should read it.", "")
        assert complete(turn) == [True]

    def test_a_think_close_without_separator_before_the_response(self, parse_every_way) -> None:
        turn = parse_every_way(
            f"Both are back.{CLOSE}think{opened('response')}B is larger.{closed('response')}{closed('message')}"
        )
        assert (turn.reasoning, turn.content) == ("Both are back.", "B is larger.")
        assert turn.warnings == ("separator_missing",)

    def test_a_think_close_without_separator_before_text(self, parse_every_way) -> None:
        turn = parse_every_way(f"Both are back.{CLOSE}thinkThe answer is B.")
        assert (turn.reasoning, turn.content) == ("Both are back.", "The answer is B.")

    def test_a_response_may_follow_the_thinking_without_a_close(self, parse_every_way) -> None:
        turn = parse_every_way("Hm." + opened("response") + "Yes." + closed("response"))
        assert (turn.reasoning, turn.content) == ("Hm.", "Yes.")


class TestB16TheChannelIsOpenedAgain:
    def test_a_repeated_open_is_ignored(self, parse_every_way) -> None:
        turn = parse_every_way(opened("think") + "Plan." + closed("think") + opened("response") + "Hi.")
        assert (turn.reasoning, turn.content) == ("Plan.", "Hi.")


class TestB19TheStartChannelComesFromThePrompt:
    def test_a_fresh_turn_starts_in_thinking_whatever_the_history_holds(self) -> None:
        history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "r"}]
        assert parse_request({"messages": [*history, {"role": "user", "content": "c"}]}).start == "think"

    def test_and_is_parsed_from_there(self, parse_every_way) -> None:
        turn = parse_every_way("Hmm." + closed("think") + opened("response") + "Yes.")
        assert (turn.reasoning, turn.content) == ("Hmm.", "Yes.")


class TestB21Case9TheAnswerIsInTheThinkChannel:
    def test_it_stays_reasoning_and_is_flagged(self, parse_every_way) -> None:
        turn = parse_every_way("The answer is 4." + closed("response") + closed("message") + END, reason="stop")
        assert (turn.reasoning, turn.content) == ("The answer is 4.", "")
        assert turn.warnings == ("response_closed_in_think",)


class TestB26ConstrainedJsonWithoutAResponseChannel:
    def test_the_json_is_the_content(self, parse_every_way) -> None:
        turn = parse_every_way("Name and age are missing." + closed("think") + '{"reply":"no text given"}')
        assert (turn.reasoning, turn.content) == ("Name and age are missing.", '{"reply":"no text given"}')

    def test_truncated_thinking_claims_no_json(self, parse_every_way) -> None:
        assert parse_every_way('Name {"reply": 1}' + f"{CLOSE}thi").content == ""


class TestB28ControlTokensOfTheModel:
    def test_a_pad_ends_the_turn_and_is_never_text(self, toy: K3Tokenizer) -> None:
        parser = TurnParser(toy, start="response")
        parser.feed([*toy.encode_text("ab"), toy.special.pad, *toy.encode_text("cd")])
        assert parser.done
        parser.finish("stop")
        assert (parser.turn.content, parser.turn.finished) == ("ab", False)
        assert parser.turn.warnings == ("control_token", "output_after_end")

    def test_spelled_markers_in_ordinary_tokens_are_text(self, toy: K3Tokenizer) -> None:
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


class TestCase13AndCase18SectionsAndEnds:
    def test_call_shaped_text_after_the_tools_is_dropped(self, parse_every_way) -> None:
        fake = 'call tool="rm" index="1"'
        turn = parse_every_way(closed("think") + tools(call("f")) + fake + call("g") + closed("message"))
        assert [c.name for c in turn.calls] == ["f"]

    def test_a_second_tools_section_is_dropped(self, parse_every_way) -> None:
        turn = parse_every_way(closed("think") + tools(call("f")) + tools(call("g")) + closed("message"))
        assert [c.name for c in turn.calls] == ["f"]
        assert turn.warnings == ("second_tools_section",)

    def test_a_call_outside_the_tools_section_is_dropped(self, parse_every_way) -> None:
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
    def test_broken_calls_are_incomplete_and_siblings_are_kept(self, parse_every_way, broken: str) -> None:
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


class TestCase14LongArguments:
    def test_200_kb_of_arguments_take_linear_time_in_single_tokens(self, toy: K3Tokenizer) -> None:
        def seconds(chars: int) -> float:
            body = ("0123456789abcdef\n" * (chars // 17 + 1))[:chars]
            ids = toy.encode_segments([Segment(opened("tools") + opened('call tool="f" index="1"'), True)])
            ids += toy.encode_segments([Segment(opened('argument key="c" type="string"') + body, True)])
            ids += toy.encode_segments([Segment(closed("argument") + closed("call"), True)])
            parser = TurnParser(toy, start="response")
            begin = time.perf_counter()
            for token in ids:
                parser.feed([token])
            parser.finish("length")
            elapsed = time.perf_counter() - begin
            assert json.loads(parser.turn.calls[0].arguments) == {"c": body}
            return elapsed

        small = max(seconds(20_000), 0.01)
        assert seconds(200_000) < 40 * small
