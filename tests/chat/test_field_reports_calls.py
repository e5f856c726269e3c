"""Tool calls that broke other K3 servers (field reports B01-B12), parsed in every way"""

import json

import pytest

from k3_sglang.chat.encode import render
from k3_sglang.chat.events import CallArgumentsDelta, CallStart
from k3_sglang.chat.parse import TurnParser, new_call_id
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.chat.spoken import CLOSE, SEP, argument, arguments_of, call, closed, complete, opened, tools


class TestB01ArgumentsThatAreNoJson:
    def test_b01_bad_values_become_strings_and_siblings_stay(self, parse_every_way) -> None:
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
    def test_b01_values_by_declared_type_with_fallback_to_text(self, parse_every_way, kind, value, delivered) -> None:
        turn = parse_every_way(tools(call("f", argument("a", value, kind))))
        assert arguments_of(turn) == [{"a": delivered}]
        assert complete(turn) == [True]

    def test_b01_one_bad_call_keeps_its_siblings(self, parse_every_way) -> None:
        nameless = opened('call index="1"') + argument("a", "1") + closed("call")
        turn = parse_every_way(tools(nameless, call("ok", argument("a", "2"), index=2)))
        assert [(c.name, c.complete) for c in turn.calls] == [("ok", True)]
        assert turn.warnings[:2] == ("think_not_closed", "call_without_name")


class TestB02NamesAndKeysAreUnescaped:
    def test_b02_values_are_not_unescaped(self, parse_every_way) -> None:
        turn = parse_every_way(tools(call("a&amp;b&quot;c", argument("k&quot;1", "v&2 &quot;"))))
        assert turn.calls[0].name == 'a&b"c'
        assert arguments_of(turn) == [{'k"1': "v&2 &quot;"}]

    @pytest.mark.parametrize(
        ("written", "name"), [("x&amp;quot;y", "x&quot;y"), ("a<b", "a<b"), ("my.ns.f", "my.ns.f")]
    )
    def test_b02_odd_names_survive(self, parse_every_way, written: str, name: str) -> None:
        assert parse_every_way(tools(call(written))).calls[0].name == name

    def test_b02_attribute_order_and_a_missing_type_do_not_matter(self, parse_every_way) -> None:
        swapped = (
            opened('call index="1" tool="f"') + opened('argument type="number" key="n"') + "1" + closed("argument")
        )
        untyped = opened('argument key="s"') + "1" + closed("argument") + closed("call")
        assert arguments_of(parse_every_way(tools(swapped + untyped))) == [{"n": 1, "s": "1"}]

    def test_b02_rendering_what_was_parsed_renders_the_same(self, toy: K3Tokenizer) -> None:
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
    def test_b03_the_first_delta_comes_with_the_name_and_strings_stream(self, toy: K3Tokenizer) -> None:
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

    def test_b03_every_prefix_of_the_pieces_is_a_prefix_of_the_result(self, toy: K3Tokenizer) -> None:
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
    def test_b04_ids_are_unique_and_say_nothing(self, toy: K3Tokenizer) -> None:
        ids: set[str] = set()
        for _ in range(2):
            parser = TurnParser(toy, start="think")
            parser.feed_text(tools(call("list_dir"), call("list_dir", index=2)))
            parser.finish("length")
            ids |= {c.id for c in parser.turn.calls}
            assert not any("list_dir" in c.id for c in parser.turn.calls)
        assert len(ids) == 4

    def test_b04_an_id_is_none_of_the_history_whole_or_compacted(self, toy: K3Tokenizer) -> None:
        history = [
            {"role": "user", "content": "List . then /"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "list_dir_0", "function": {"name": "list_dir", "arguments": '{"path":"."}'}}],
            },
            {"role": "tool", "tool_call_id": "list_dir_0", "name": "list_dir", "content": "a b c"},
        ]
        ids: set[str] = set()
        for messages in (history, history[2:]):
            parser = TurnParser(toy, start=parse_request({"messages": messages}).start)
            parser.feed_text(tools(call("list_dir", argument("path", "/"))))
            parser.finish("stop")
            ids.add(parser.turn.calls[0].id)
        assert len(ids) == 2 and "list_dir_0" not in ids

    def test_b04_a_thousand_ids_differ(self) -> None:
        assert len({new_call_id() for _ in range(1000)}) == 1000


class TestB05NoToolsDeclared:
    @pytest.mark.parametrize("cut", [None, 60, 40, 28, 24, 20])
    def test_b05_the_tools_section_is_dropped_whole_or_cut(self, parse_every_way, cut: int | None) -> None:
        text = ("Sure." + closed("response") + tools(call("calculator", argument("expression", "37*19"))))[:cut]
        turn = parse_every_way(text, start="response", calls_allowed=False)
        assert (turn.content, turn.calls) == ("Sure.", ())


class TestB06MessageCloseIsNotContent:
    @pytest.mark.parametrize(
        "text", ["Hello" + closed("message"), "Hello<|close|>mess", "Hello<|close|>", "Hello<|clo"]
    )
    @pytest.mark.parametrize("reason", ["stop", "length"])
    def test_b06_no_part_of_a_marker_surfaces(self, parse_every_way, text: str, reason: str) -> None:
        assert parse_every_way(text, start="response", reason=reason).content == "Hello"


class TestB08FusedTags:
    def test_b08_nothing_is_executed_on_a_guess(self, parse_every_way) -> None:
        text = "Done." + opened('toolscall tool="StrReplace" index="1"')
        text += opened('argument key="path" type="string"') + f"src/aargument{SEP}"
        text += f"{CLOSE}call{SEP}{CLOSE}toolsmessage{SEP}"
        turn = parse_every_way(text, start="response")
        assert (turn.content, turn.calls) == ("Done.", ())
        assert "malformed_tag" in turn.warnings

    def test_b08_fused_tags_inside_the_thinking_are_no_call_either(self, parse_every_way) -> None:
        turn = parse_every_way('I will rend<|open|>toolscall tool="StrReplace" index="1"<|sep|>rererargument<|sep|>')
        assert (turn.reasoning, turn.content, turn.calls) == ("I will rend", "", ())


class TestB09UndeclaredTools:
    def test_b09_calls_of_unknown_tools_are_reported_in_order_for_the_runtime_to_answer(self, parse_every_way) -> None:
        turn = parse_every_way(tools(call("get_weather", argument("city", "Oslo")), call("img_gen", index=2)))
        assert [(c.name, c.complete) for c in turn.calls] == [("get_weather", True), ("img_gen", True)]

    def test_b09_a_call_of_an_unknown_tool_keeps_its_arguments(self, parse_every_way) -> None:
        turn = parse_every_way(tools(call("img_gen", argument("prompt", "a cat")), call("now", index=2)))
        assert [c.arguments for c in turn.calls] == ['{"prompt": "a cat"}', "{}"]


class TestB10WhiteSpaceIsKept:
    @pytest.mark.parametrize("value", ["\n    def f():\n\tpass\n", "  ", "\r\n", "a\u2028b", "🚀\x01\x7f", ""])
    def test_b10_string_values_are_byte_exact(self, parse_every_way, value: str) -> None:
        turn = parse_every_way(tools(call("my.ns.edit-file", argument("old", value), argument("new", "  "))))
        assert turn.calls[0].name == "my.ns.edit-file"
        assert arguments_of(turn) == [{"old": value, "new": "  "}]

    def test_b10_reasoning_and_content_keep_their_edges(self, parse_every_way) -> None:
        turn = parse_every_way(" \n a \n" + closed("think") + opened("response") + "\n b \t" + closed("response"))
        assert (turn.reasoning, turn.content) == (" \n a \n", "\n b \t")


class TestB11OneRuleForTypesAndDuplicates:
    def test_b11_the_declared_type_decides(self, parse_every_way) -> None:
        assert arguments_of(parse_every_way(tools(call("f", argument("days", "3"))))) == [{"days": "3"}]

    def test_b11_the_first_of_duplicate_arguments_counts(self, parse_every_way) -> None:
        twice = argument("days", "1", "number") + argument("days", "2", "number") + argument("city", "Oslo")
        turn = parse_every_way(tools(call("f", twice)))
        assert turn.calls[0].arguments == '{"days": 1, "city": "Oslo"}'
        assert complete(turn) == [True]
        assert "duplicate_argument" in turn.warnings

    def test_b11_duplicate_keys_inside_a_value_are_not_passed_on(self, parse_every_way) -> None:
        turn = parse_every_way(tools(call("f", argument("o", '{"a": 1, "a": 2}', "object"))))
        assert turn.calls[0].arguments == '{"o": {"a": 2}}'


class TestB12CutCalls:
    def test_b12_the_cut_call_is_incomplete_and_the_whole_one_is_kept(self, parse_every_way) -> None:
        text = opened("tools") + call("get_weather", argument("city", "Oslo"))
        text += opened('call tool="get_weather" index="2"') + opened('argument key="city" type="string"') + "Ber"
        turn = parse_every_way(text)
        assert complete(turn) == [True, False]
        assert arguments_of(turn) == [{"city": "Oslo"}, {"city": "Ber"}]
        assert not turn.finished

    @pytest.mark.parametrize("cut", range(1, 120, 4))
    def test_b12_wherever_a_call_is_cut_it_is_json_and_can_be_sent_back(self, parse_every_way, cut) -> None:
        text = opened("tools") + call("f", argument("s", 'a"\\'), argument("n", "[1, 2]", "array"), argument("t", "x"))
        turn = parse_every_way(text[:-cut])
        assert not any(complete(turn)) or cut <= 0
        calls = [{"id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in turn.calls]
        render(parse_request({"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}))
