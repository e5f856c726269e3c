"""Turn grammars compiled by xgrammar: what they accept, reject, and what random walks through them produce."""

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3_sglang.chat.encode import encode
from k3_sglang.chat.grammar import constraint, turn_grammar
from k3_sglang.chat.grammar_rules import char_set, without
from k3_sglang.chat.grammar_strings import TEXT
from k3_sglang.chat.parse import TurnParser
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, Message, Segment, ToolCall
from tests.chat.grammar_engine import Engine

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema comes with the serve extra")

USER = {"role": "user", "content": "hi"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def closed(tag: str) -> str:
    return f"<|close|>{tag}<|sep|>"


def opened(tag: str) -> str:
    return f"<|open|>{tag}<|sep|>"


def argument(key: str, kind: str, value: str) -> str:
    return opened(f'argument key="{key}" type="{kind}"') + value + closed("argument")


def call(name: str, *arguments: str, index: int = 1) -> str:
    return opened(f'call tool="{name}" index="{index}"') + "".join(arguments) + closed("call")


def turn(*calls: str, response: str | None = "") -> str:
    text = closed("think")
    if response is not None:
        text += opened("response") + response + closed("response")
    if calls:
        text += opened("tools") + "".join(calls) + closed("tools")
    return text + closed("message") + "<|end_of_msg|>"


@pytest.fixture(scope="module")
def engine(toy: K3Tokenizer) -> Engine:
    return Engine(toy)


@pytest.fixture
def accepts(engine: Engine) -> Callable[..., bool]:
    return lambda request, text, **options: engine.accepts(engine.matcher(request, **options), text)


def asks(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], **fields}


REQUIRED = asks(tools=TOOLS, tool_choice="required")


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


# Schemas of one argument `v`, each with (type attribute, text) pairs that are legal and that are not.
SCHEMAS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "argument_schemas.json").read_text("utf-8")
)
NODE = {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}
TREE = {"葉": {"type": "array", "items": {"$ref": "#/$defs/tree"}}, "mark": {"$ref": "#/$defs/mark"}}
DEFS = {
    "node": {"type": "object", "properties": NODE, "required": ["v"]},
    "tree": {"type": "object", "properties": TREE, "required": ["葉"]},
    "mark": {"anyOf": [{"const": "x"}, {"const": "y"}]},
}


def tool_of(schema: Any, *, key: str = "v", required: bool = True) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: schema}, "$defs": DEFS, "required": [key] if required else []}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize("case", SCHEMAS, ids=lambda case: json.dumps(case["schema"])[:40])
def test_arguments_follow_their_schema(engine: Engine, case: dict[str, Any]) -> None:
    request = asks(tools=[tool_of(case["schema"])], tool_choice="required")
    for kind, value in case["legal"]:
        assert engine.accepts(engine.matcher(request), turn(call("f", argument("v", kind, value)))), (kind, value)
    for kind, value in case["illegal"]:
        assert not engine.accepts(engine.matcher(request), turn(call("f", argument("v", kind, value)))), (kind, value)


class TestB22UndeclaredArgumentsNeverUseADeclaredName:
    PARAMETERS = {
        "type": "object",
        "properties": {"data": {"type": "integer"}},
        "additionalProperties": {
            "type": "object",
            "properties": {"data": {"type": "string"}},
            "additionalProperties": True,
        },
    }

    def test_b22_at_the_top_level_of_a_tool(self, accepts) -> None:
        request = asks(
            tools=[{"type": "function", "function": {"name": "f", "parameters": self.PARAMETERS}}],
            tool_choice="required",
        )
        data, extra = argument("data", "number", "1"), argument("x", "object", '{"data": "s"}')
        assert accepts(request, turn(call("f", data, extra)))
        assert accepts(request, turn(call("f", argument("dat", "object", "{}"))))
        assert not accepts(request, turn(call("f", argument("data", "object", '{"data": "s"}'))))
        assert not accepts(request, turn(call("f", data, argument("data", "object", "{}"))))


class TestNamesInAttributes:
    @pytest.mark.parametrize("key", ["资料", 'a"b', "a&b", "&quot;", "with space", "<|sep|>"])
    def test_case19_keys_are_escaped_as_the_encoder_does(self, engine: Engine, key: str) -> None:
        request = asks(tools=[tool_of({"type": "string"}, key=key)], tool_choice="required")
        spoken = Message("assistant", "", None, (ToolCall("", "f", json.dumps({key: "x"})),))
        prompt = encode(ChatRequest((), effort=None), engine.tokenizer).ids
        whole = encode(ChatRequest((spoken,), effort=None, add_generation_prompt=False), engine.tokenizer).ids
        matcher = engine.matcher(request)
        assert all(matcher.accept_token(token) for token in whole[len(prompt) :])
        assert matcher.is_terminated()


class TestLoosening:
    @pytest.mark.parametrize(
        ("schema", "note"),
        [
            ({"type": "string", "pattern": "^a+$"}, "pattern"),
            ({"type": "array", "uniqueItems": True}, "uniqueItems"),
            ({"not": {"type": "string"}}, "not"),
            ({"$ref": "#/$defs/missing"}, "$ref #/$defs/missing"),
            ({"$ref": "http://example.org/schema"}, "$ref http://example.org/schema"),
            ({"type": "number", "minimum": 0.5}, "range of a non-integer number"),
            ({"type": "colour"}, "type 'colour'"),
            ({"enum": []}, "no value allowed"),
            (False, "no value allowed"),
            ({"type": "integer", "minimum": 5, "maximum": 1}, "empty range"),
            ({"type": "string", "minLength": 5, "maxLength": 1}, "minLength over maxLength"),
            ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "type given twice"),
            ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
            ({"type": "string", "minLength": 1, "maxLength": 17}, "maxLength 17"),
            ({"type": "array", "items": {"type": "string", "minLength": 17}}, "minLength 17"),
            ({"enum": ["a", "b"], "type": "integer"}, "no value allowed"),
            ({"const": 1, "minimum": 2}, "no value allowed"),
            ({"enum": ["a", "b"], "pattern": "^a$"}, "pattern"),
            ({"allOf": [{"$ref": "#/$defs/gone", "type": "string"}]}, "$ref #/$defs/gone"),
            (
                {"properties": {"a": {}}, "additionalProperties": False, "allOf": [{"properties": {"b": {}}}]},
                "additionalProperties beside properties of another schema",
            ),
        ],
    )
    def test_what_cannot_be_said_loosens_one_argument_and_is_named(self, engine: Engine, schema, note) -> None:
        request = parse_request(asks(tools=[tool_of(schema)], tool_choice="required"))
        grammar = turn_grammar(request, "think")
        assert grammar is not None
        assert grammar.loosened == (f"f: {note}",)
        engine.matcher(request)

    def test_exact_schemas_are_not_reported(self) -> None:
        for case in SCHEMAS:
            request = parse_request(asks(tools=[tool_of(case["schema"])], tool_choice="required"))
            grammar = turn_grammar(request, "think")
            assert grammar is not None
            assert grammar.loosened == ()

    def test_bottomless_schemas_are_refused_not_crashed_on(self) -> None:
        schema: dict[str, Any] = {}
        for _ in range(400):
            schema = {"type": "array", "items": schema}
        request = parse_request(asks(tools=[tool_of(schema)], tool_choice="required"))
        with pytest.raises(ValueError, match="nested too deeply"):
            turn_grammar(request, "think")


def forced_requests() -> Iterator[dict[str, Any]]:
    schemas = [case["schema"] for case in SCHEMAS if isinstance(case["schema"], dict)]
    yield asks()
    yield asks(tools=TOOLS)
    yield {"messages": [USER, {"role": "tool", "name": "now", "content": "x"}], "tools": TOOLS}
    yield asks(tools=TOOLS, tool_choice="none", thinking=False)
    yield asks(tools=TOOLS, response_format={"type": "json_object"})
    for schema in schemas:
        yield asks(tools=[tool_of(schema), tool_of(schema, required=False) | {"function": {"name": "g"}}])
        wanted = {**schema, "$defs": DEFS}
        yield asks(response_format={"type": "json_schema", "json_schema": {"schema": wanted}}, thinking=False)


class TestForcedTurns:
    """Untrained weights, held to whole turns."""

    @pytest.mark.parametrize("request_", list(forced_requests()), ids=lambda request: "")
    def test_random_walks_are_short_valid_turns(self, engine: Engine, request_: dict[str, Any]) -> None:
        parsed = parse_request(request_)
        grammar = turn_grammar(parsed, parsed.start, force=True)
        assert grammar is not None
        drawn = random.Random(json.dumps(request_))
        for _ in range(4):
            ids = engine.walk(engine.matcher(parsed, force=True), drawn, limit=600)
            parser = TurnParser(engine.tokenizer, start=parsed.start)
            parser.feed(ids)
            assert parser.done
            spoken = parser.turn
            assert (spoken.finished, spoken.warnings) == (True, ()), engine.tokenizer.decode(ids)
            self.check_calls(parsed, spoken.calls)
            if parsed.response_format is not None and not spoken.calls:
                jsonschema.validate(json.loads(spoken.content), parsed.response_format.schema or {"type": "object"})
            elif parsed.response_format is None:
                assert spoken.content

    def check_calls(self, request: ChatRequest, calls: Any) -> None:
        schemas = {t["function"]["name"]: t["function"].get("parameters") or {} for t in request.declared_tools}
        must_call = bool(schemas) and request.tool_choice != "none" and request.messages[-1].role != "tool"
        assert len(calls) == 1 if must_call else len(calls) <= 1
        for made in calls:
            assert made.complete
            jsonschema.validate(json.loads(made.arguments), schemas[made.name])

    def test_after_tool_results_a_call_is_optional(self, engine: Engine) -> None:
        request = {"messages": [USER, {"role": "tool", "name": "now", "content": "x"}], "tools": TOOLS}
        assert engine.accepts(engine.matcher(request, force=True), "a" + turn(response="x"))
        assert engine.accepts(engine.matcher(request, force=True), "a" + turn(call("now"), response="x"))

    def test_strings_come_from_their_enum_and_have_no_free_white_space(self, engine: Engine) -> None:
        request = asks(tools=[tool_of({"enum": ["c", "f"]})])
        drawn = random.Random(0)
        values: set[str] = set()
        for _ in range(20):
            text = engine.tokenizer.decode(engine.walk(engine.matcher(request, force=True), drawn, limit=300))
            values.add(text.split('type="string"<|sep|>')[1].split("<|close|>")[0])
        assert values == {"c", "f"}


class TestUnconstrainedLengths:
    def test_a_walk_that_wants_to_end_ends(self, engine: Engine) -> None:
        """Random text, but structure whenever the grammar allows some: contracts are met without detours."""
        special = engine.tokenizer.is_special
        for fields in (REQUIRED, asks(response_format={"type": "json_object"}), asks(tools=TOOLS, tool_choice="none")):
            matcher = engine.matcher(fields)
            drawn = random.Random(1)
            ids: list[int] = []
            while not matcher.is_terminated():
                allowed = engine.allowed(matcher)
                eager = [token for token in allowed if special(token) or bytes([token % 256]) in b'}"']
                ids.append(drawn.choice(eager or allowed))
                assert matcher.accept_token(ids[-1])
                assert len(ids) < 2000


def test_one_compiler_serves_many_grammars_with_the_masks_of_a_fresh_one(engine: Engine) -> None:
    """xgrammar's compile cache confuses grammars that differ in token elements only; ours have none."""
    drawn = random.Random(2)
    for request in list(forced_requests())[::3]:
        for force in (True, False):
            parsed = parse_request(request)
            if constraint(parsed, parsed.start, force=force) is None:
                continue
            shared, fresh = engine.matcher(parsed, force=force), Engine(engine.tokenizer).matcher(parsed, force=force)
            for _ in range(60):
                allowed = engine.allowed(fresh)
                assert engine.allowed(shared) == allowed
                structure = [token for token in allowed if engine.tokenizer.is_special(token)]
                token = drawn.choice(structure or allowed)
                assert shared.accept_token(token) and fresh.accept_token(token)
                if fresh.is_terminated():
                    break


@pytest.mark.timeout(300)
def test_the_released_vocabulary_takes_the_same_turns(release: K3Tokenizer) -> None:
    engine = Engine(release)
    text = "Thinking about 东京 🚀." + turn(
        call("get_weather", argument("city", "string", "东京"), argument("days", "number", "3"))
    )
    assert engine.accepts(engine.matcher(REQUIRED), text)
    assert not engine.accepts(engine.matcher(REQUIRED), turn(response="没有"))


@pytest.mark.timeout(300)
def test_strings_are_masked_much_faster_than_by_the_obvious_rule(release: K3Tokenizer) -> None:
    """In a repeated choice of character and escape the engine tries 160,000 tokens anew for every token generated."""
    engine = Engine(release)
    schema = {"type": "array", "items": {"type": "string"}}
    request = asks(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    obvious = 'root ::= "[" string ("," " "? string)* "]"\nstring ::= "\\"" ([^"\\\\\\n] | "\\\\" escaped)* "\\""\n'
    obvious += 'escaped ::= (["\\\\/bfnrt] | "u" [0-9a-fA-F]{4})'
    text = '["a \\"quoted\\" word", "and another \\n", "'

    def seconds(matcher: Any, prefix: str) -> float:
        assert all(matcher.accept_token(token) for token in release.encode_segments([Segment(prefix, True)]))
        begin = time.process_time()
        for token in release.encode_text(text):
            engine.fill(matcher)
            assert matcher.accept_token(token)
        return time.process_time() - begin

    slow = seconds(engine.matcher_of(obvious), "")
    fast = seconds(engine.matcher(request), closed("think") + opened("response"))
    assert fast < slow / 5


def test_no_text_may_hold_bytes_that_are_not_utf_8(engine: Engine) -> None:
    """A token of the toy vocabulary is a byte; ED A0 80 would be half a surrogate pair, E0 80 a zero too long."""
    matcher = engine.matcher(REQUIRED)
    for first, wrong, right in ((0xED, 0xA0, 0x9F), (0xE0, 0x80, 0xA0), (0xF4, 0x90, 0x8F)):
        assert matcher.accept_token(first)
        assert not matcher.accept_token(wrong)
        assert all(matcher.accept_token(token) for token in (right, 0x80, 0x80)[: 3 if first == 0xF4 else 2])
    assert not matcher.accept_token(0xC0)


@pytest.mark.parametrize("hole", ["名", "é", "\U0001f680", "a"])
def test_a_set_without_a_character_has_all_its_neighbours(engine: Engine, hole: str) -> None:
    """A range that ends inside the characters of one first byte loses the others of them in xgrammar 0.2.7."""
    within = char_set(without(TEXT, [ord(hole)]))
    for distance in (1, 2, 63, 64, 65, 500, 4000):
        for neighbour in (chr(max(ord(hole) - distance, 0)), chr(ord(hole) + distance)):
            assert engine.accepts(engine.matcher_of(f"root ::= {within}"), f"{neighbour}<|end_of_msg|>"), neighbour
    assert not engine.accepts(engine.matcher_of(f"root ::= {within}"), f"{hole}<|end_of_msg|>")


def test_undeclared_names_may_begin_like_declared_ones(accepts) -> None:
    parameters = {"type": "object", "properties": {"名": {"type": "string"}}, "additionalProperties": True}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for key in ("先", "地", "名前", "x"):
        assert accepts(asks(tools=[tool], tool_choice="required"), turn(call("f", argument(key, "string", "x"))))
