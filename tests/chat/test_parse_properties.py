"""Properties of the parser: echo of rendered turns, chunking, garbage, decidable order of events."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.chat.encode import encode
from k3_sglang.chat.parse import TurnParser
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Channel, ChatRequest, Message, Segment, ToolCall
from tests.chat.spoken import argument, closed, opened
from tests.chat.work import work

MARKERS = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", '"', "&", "&quot;", "&amp;", "think", "argument"]
texts = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(MARKERS)), max_size=6).map("".join)
numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
names = texts.filter(bool)
calls = st.lists(st.tuples(names, st.dictionaries(texts, values, max_size=4)), max_size=3)


def spoken_ids(toy: K3Tokenizer, turn: Message, *, thinking: bool) -> list[int]:
    """What a model would have generated for this turn: its rendering after the generation prompt."""
    bare = ChatRequest(messages=(), effort=None, thinking=thinking, add_generation_prompt=False)
    prompt = encode(ChatRequest(messages=(), effort=None, thinking=thinking), toy).ids
    whole = encode(ChatRequest(messages=(turn,), effort=None, thinking=thinking, add_generation_prompt=False), toy).ids
    assert encode(bare, toy).ids == ()
    assert whole[: len(prompt)] == prompt
    return list(whole[len(prompt) :])


def chunks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@settings(max_examples=200, deadline=None)
@given(texts, texts, calls, st.booleans(), st.lists(st.integers(0, 10_000), max_size=20))
def test_a_rendered_turn_parses_back_to_itself(
    vocabulary: K3Tokenizer, reasoning: str, content: str, made: list[tuple[str, dict[str, Any]]], thinking: bool, cuts
) -> None:
    tool_calls = tuple(ToolCall("", name, json.dumps(arguments)) for name, arguments in made)
    turn = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tool_calls)
    parser = TurnParser(vocabulary, start="think" if thinking else "response")
    for piece in chunks(spoken_ids(vocabulary, turn, thinking=thinking), cuts):
        parser.feed(piece)
    parser.finish("stop")
    parsed = parser.turn
    blank = not reasoning or reasoning.isspace() or not thinking
    assert parsed.reasoning == ("" if blank else reasoning)
    assert parsed.content == content
    assert [(c.name, json.loads(c.arguments), c.complete) for c in parsed.calls] == [(n, a, True) for n, a in made]
    assert (parsed.finished, parsed.warnings) == (True, ())


@st.composite
def garbage(draw: st.DrawFn) -> list[int]:
    """Token ids with many markers and tag names; the toy vocabulary has 275 pieces and 16 control tokens."""
    tag = st.sampled_from(["think", "response", "tools", 'call tool="f" index="1"', "call", "argument", "message"])
    typed = st.sampled_from(['argument key="a" type="string"', 'argument key="b" type="number"', 'json type="object"'])
    word = st.one_of(tag, typed, st.text(max_size=3)).map(lambda text: list(text.encode()))
    marker = st.sampled_from([278, 279, 280]).map(lambda token: [token])
    any_token = st.integers(0, 290).map(lambda token: [token])
    end = st.sampled_from([[277]])
    pieces = draw(st.lists(st.one_of(word, marker, marker, any_token, word, marker, end), max_size=60))
    return [token for piece in pieces for token in piece]


@settings(max_examples=400, deadline=None)
@given(
    garbage(),
    st.lists(st.integers(0, 10_000), max_size=30),
    st.sampled_from(["stop", "length", "abort"]),
    st.booleans(),
)
def test_no_output_crashes_the_parser_and_chunking_changes_nothing(
    toy: K3Tokenizer, ids, cuts, reason, allowed
) -> None:
    def run(pieces: list[list[int]]):
        numbers = iter(range(1000))
        parser = TurnParser(toy, start="think", new_call_id=lambda: f"c{next(numbers)}", calls_allowed=allowed)
        events = [event for piece in pieces for event in parser.feed(piece)]
        events += parser.finish(reason)
        return parser.turn, events

    whole, _ = run([ids])
    for pieces in (chunks(ids, cuts), [[token] for token in ids]):
        turn, _ = run(pieces)
        assert turn == whole
    for parsed in whole.calls:
        assert isinstance(json.loads(parsed.arguments), dict)
    assert not any(mark in text for text in (whole.reasoning, whole.content) for mark in ("[PAD]", "[BOS]"))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(MARKERS), st.text(max_size=5)), max_size=30).map("".join), st.integers(1, 9))
def test_chunking_of_text_changes_nothing(text: str, size: int) -> None:
    def run(step: int):
        parser = TurnParser(None, start="response", new_call_id=lambda: "c")
        for begin in range(0, len(text), step):
            parser.feed_text(text[begin : begin + step])
        parser.finish("length")
        return parser.turn

    assert run(size) == run(max(len(text), 1))


def long_call(toy: K3Tokenizer, chars: int, kind: str) -> list[int]:
    """A call with one argument of `chars` characters."""
    body = ("0123456789abcde\n" * (chars // 16 + 1))[:chars]
    if kind != "string":
        body = json.dumps([body])
    text = opened("tools") + opened('call tool="f" index="1"') + argument("c", body, kind) + closed("call")
    return toy.encode_segments([Segment(text, True)])


def garbage_tokens(tokens: int) -> list[int]:
    """Random ids, three quarters of them markers."""
    drawn = random.Random(5)
    return [drawn.choice((278, 279, 280, drawn.randrange(275))) for _ in range(tokens)]


def fed_one_by_one(toy: K3Tokenizer, ids: list[int], start: Channel = "think") -> TurnParser:
    parser = TurnParser(toy, start=start)
    for token in ids:
        parser.feed([token])
    parser.finish("length")
    return parser


@pytest.mark.parametrize("kind", ["string", "array"])
def test_case14_200_kb_of_arguments_are_read_in_single_tokens(toy: K3Tokenizer, kind: str) -> None:
    parser = fed_one_by_one(toy, long_call(toy, 200_000, kind))
    value = json.loads(parser.turn.calls[0].arguments)["c"]
    assert len(value if kind == "string" else value[0]) == 200_000
    assert parser.turn.calls[0].complete


@pytest.mark.parametrize(
    "ids_of",
    [
        lambda toy, size: long_call(toy, size, "string"),
        lambda toy, size: long_call(toy, size, "array"),
        lambda toy, size: garbage_tokens(size),
        lambda toy, size: toy.encode_segments([Segment("<|open|>" + "x" * (5 * size), True)]),
        lambda toy, size: toy.encode_segments([Segment("<|close|>think" * (size // 8), True)]),
        lambda toy, size: list(b"\xe4" * size),
    ],
    ids=["string argument", "array argument", "garbage", "endless tag", "closes", "broken UTF-8"],
)
@pytest.mark.parametrize("piece", [1, 50_000], ids=["one by one", "at once"])
def test_four_times_the_output_is_four_times_the_work(
    toy: K3Tokenizer, ids_of: Callable[[K3Tokenizer, int], list[int]], piece: int
) -> None:
    def parsed(size: int) -> int:
        ids = ids_of(toy, size)
        parser = TurnParser(toy, start="think")

        def run() -> None:
            for begin in range(0, len(ids), piece):
                parser.feed(ids[begin : begin + piece])
            parser.finish("length")

        return work(run)

    parsed(100)  # fills caches of compiled patterns
    assert parsed(16_000) < 4.5 * parsed(4_000)


def test_four_times_the_text_is_four_times_the_work() -> None:
    def parsed(size: int) -> int:
        text = ("<|open|>tools<|sep|><" + "|" * 5 + "<|clo") * (size // 32)
        parser = TurnParser(None, start="think")

        def run() -> None:
            for begin in range(0, len(text), 3):
                parser.feed_text(text[begin : begin + 3])
            parser.finish("length")

        return work(run)

    parsed(320)
    assert parsed(24_000) < 4.5 * parsed(6_000)


def test_the_counter_would_notice_work_that_grows_with_the_square() -> None:
    def quadratic(size: int) -> int:
        def touch(text: str) -> None: ...

        def run() -> None:
            for length in range(size):
                touch("x" * length)

        return work(run)

    assert quadratic(400) > 8 * quadratic(100)
