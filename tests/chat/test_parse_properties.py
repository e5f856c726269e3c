"""Properties of the parser: echo of rendered turns, chunking, garbage, decidable order of events."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.chat.encode import encode
from k3_sglang.chat.parse import TurnParser
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, Message, ToolCall

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
    toy: K3Tokenizer, reasoning: str, content: str, made: list[tuple[str, dict[str, Any]]], thinking: bool, cuts
) -> None:
    tool_calls = tuple(ToolCall("", name, json.dumps(arguments)) for name, arguments in made)
    turn = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tool_calls)
    parser = TurnParser(toy, start="think" if thinking else "response")
    for piece in chunks(spoken_ids(toy, turn, thinking=thinking), cuts):
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


def test_random_token_garbage_takes_linear_time(toy: K3Tokenizer) -> None:
    import random
    import time

    def seconds(tokens: int) -> float:
        drawn = random.Random(5)
        ids = [drawn.choice((278, 279, 280, drawn.randrange(275))) for _ in range(tokens)]
        parser = TurnParser(toy, start="response")
        begin = time.perf_counter()
        parser.feed(ids)
        parser.finish("length")
        return time.perf_counter() - begin

    small = max(seconds(20_000), 0.01)
    assert seconds(200_000) < 40 * small
