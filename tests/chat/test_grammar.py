"""Turn grammars compiled by xgrammar: which turns they accept and which they reject."""

import pytest

from k3_sglang.chat.grammar import constraint
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Segment
from tests.chat.grammar_engine import Engine
from tests.chat.grammar_turns import REQUIRED, TOOLS, USER, argument, asks, call, closed, opened, turn


class TestB23RequiredCallsInK3sFormat:
    @pytest.mark.parametrize(
        "text",
        [
            "Thinking <b> & more.\n" + turn(call("now")),
            turn(call("get_weather", argument("city", "string", "Oslo <|\n é 你"))),
            turn(call("get_weather", argument("city", "string", ""), argument("days", "number", "-3")), response=None),
            turn(call("now"), call("now", index=2), call("get_weather", argument("city", "string", "a"), index=3)),
            turn(call("now"), response="I will look."),
        ],
    )
    def test_b23_legal_turns_are_accepted(self, accepts, text: str) -> None:
        assert accepts(REQUIRED, text)

    @pytest.mark.parametrize(
        "text",
        [
            '[{"name": "now"}]',
            closed("think") + '[{"name": "now", "parameters": {}}]',
            turn(),
            turn(response="No."),
            turn(call("other")),
            turn(call("get_weather")),
            turn(call("get_weather", argument("days", "number", "3"))),
            turn(call("get_weather", argument("city", "number", "3"))),
            turn(call("get_weather", argument("city", "string", "a"), argument("days", "number", "x"))),
            turn(call("get_weather", argument("city", "string", "a"), argument("days", "number", "1.5"))),
            turn(call("get_weather", argument("city", "string", "a"), argument("wind", "string", "x"))),
            turn(call("now", index=2)),
            "<|end_of_msg|>",
            "[PAD]" + turn(call("now")),
        ],
    )
    def test_b23_everything_else_is_rejected(self, accepts, text: str) -> None:
        assert not accepts(REQUIRED, text)

    def test_b23_a_marker_is_a_control_token_and_never_its_spelling(self, engine: Engine) -> None:
        matcher = engine.matcher(REQUIRED)
        assert engine.accepts(matcher, "") is False
        spelled = engine.tokenizer.encode_text("<|close|>think<|sep|>")
        assert all(matcher.accept_token(token) for token in spelled), "spelled markers are text of the thinking"
        assert matcher.accept_token(engine.tokenizer.special.close)
        assert engine.allowed(matcher) == [token for token in engine.allowed(matcher) if token < 275]
        assert not matcher.accept_token(engine.tokenizer.special.sep)

    def test_b23_thinking_off_starts_inside_the_response(self, accepts) -> None:
        request = {**REQUIRED, "thinking": False}
        tools = opened("tools") + call("now") + closed("tools")
        end = closed("message") + "<|end_of_msg|>"
        assert accepts(request, "Look." + closed("response") + tools + end)
        assert not accepts(request, "Look." + closed("response") + end)
        assert not accepts(request, closed("think") + opened("response") + closed("response") + tools + end)

    def test_b23_a_named_tool_is_called_once(self, accepts) -> None:
        request = asks(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
        assert accepts(request, turn(call("now")))
        assert not accepts(request, turn(call("get_weather", argument("city", "string", "a"))))
        assert not accepts(request, turn(call("now"), call("now", index=2)))

    def test_b23_without_parallel_calls_there_is_one(self, accepts) -> None:
        request = {**REQUIRED, "parallel_tool_calls": False}
        assert accepts(request, turn(call("now")))
        assert not accepts(request, turn(call("now"), call("now", index=2)))

    def test_b23_tools_of_a_system_message_count(self, accepts) -> None:
        request = {"messages": [USER, {"role": "system", "tools": TOOLS}], "tool_choice": "required"}
        assert accepts(request, turn(call("now")))


class TestB24NoLoopOnMarkers:
    def test_b24_after_a_close_only_the_channels_name_follows(self, engine: Engine) -> None:
        matcher = engine.matcher({**REQUIRED, "thinking": False})
        close = engine.tokenizer.special.close
        assert matcher.accept_token(close)
        assert not matcher.accept_token(close)
        for token in engine.tokenizer.encode_text("response"):
            assert matcher.accept_token(token)
        assert engine.allowed(matcher) == [engine.tokenizer.special.sep]

    def test_b24_the_end_is_impossible_before_the_call(self, engine: Engine) -> None:
        matcher = engine.matcher(REQUIRED)
        text = closed("think") + opened("response") + "x" + closed("response")
        for token in engine.tokenizer.encode_segments([Segment(text, True)]):
            assert engine.tokenizer.special.end_of_msg not in engine.allowed(matcher)
            assert matcher.accept_token(token)
        assert engine.allowed(matcher) == [engine.tokenizer.special.open]


class TestContracts:
    def test_a_free_turn_has_no_grammar(self) -> None:
        for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "auto"}, {"tool_choice": "none"}):
            request = parse_request(asks(**fields))
            assert constraint(request, request.start) is None

    def test_b26_tool_choice_none_allows_no_calls(self, accepts) -> None:
        request = asks(tools=TOOLS, tool_choice="none")
        assert accepts(request, turn(response="Free text."))
        assert not accepts(request, turn(call("now")))

    def test_b26_the_answer_begins_after_the_complete_think_close(self, engine: Engine) -> None:
        request = asks(response_format={"type": "json_object"})
        answer = opened("response") + "{}" + closed("response") + closed("message") + "<|end_of_msg|>"
        assert engine.accepts(engine.matcher(request), "Hm." + closed("think") + answer)
        for start in ("Hm.", "Hm.<|close|>", "Hm.<|close|>think", closed("think") + opened("think")):
            assert not engine.accepts(engine.matcher(request), start + answer)

    def test_strict_tools_may_be_left_uncalled(self, accepts) -> None:
        strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
        assert accepts(asks(tools=[strict]), turn(response="No need."))
        assert accepts(asks(tools=[strict]), turn(call("get_weather", argument("city", "string", "a"))))
        assert not accepts(asks(tools=[strict]), turn(call("get_weather")))

    def test_json_object_demands_one_object_after_free_thinking(self, accepts) -> None:
        request = asks(response_format={"type": "json_object"})
        assert accepts(request, "Free {" + turn(response='{"a": [1, {"b": null}], "c": "\\u00e9\\n"}'))
        assert accepts(request, turn(response='{\n  "a": 1,\n  "b": 2\n}'))
        for bad in ("", "[1]", '{"a": 1', '{"a": NaN}', "text", '{"a": 1} text', '{"a":' + " " * 99 + "1}"):
            assert not accepts(request, turn(response=bad))

    def test_a_response_format_beside_tools_binds_the_final_answer(self, accepts) -> None:
        request = asks(tools=TOOLS, response_format={"type": "json_object"})
        assert accepts(request, turn(response='{"a": 1}'))
        assert accepts(request, turn(call("now")))
        assert accepts(request, turn(call("now"), response=None))
        assert not accepts(request, turn(response="prose"))
        assert not accepts(request, turn(call("now"), response="prose"))


@pytest.mark.timeout(300)
def test_the_released_vocabulary_takes_the_same_turns(release: K3Tokenizer) -> None:
    engine = Engine(release)
    text = "Thinking about 东京 🚀." + turn(
        call("get_weather", argument("city", "string", "东京"), argument("days", "number", "3"))
    )
    assert engine.accepts(engine.matcher(REQUIRED), text)
    assert not engine.accepts(engine.matcher(REQUIRED), turn(response="没有"))
