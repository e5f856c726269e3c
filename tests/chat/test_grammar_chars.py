"""Character sets of grammars reach exactly UTF-8: no overlong form, no surrogate, no beginning that leads nowhere."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3_sglang.chat.grammar import constraint, turn_grammar
from k3_sglang.chat.grammar_rules import Rules, char_set, utf8_ranges, words_except
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer

xgrammar = pytest.importorskip("xgrammar", reason="xgrammar comes with the serve extra")
numpy = pytest.importorskip("numpy", reason="numpy comes with the serve extra")

SURROGATES = range(0xD800, 0xE000)
EDGES = (0x00, 0x5D, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0xCFFF, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x3FFFF, 0x10FFFF)
POINTS = st.one_of(st.sampled_from(EDGES), st.integers(0, 0x2FF), st.integers(0, 0x10FFFF))


class Bytes:
    """An engine whose tokens are the 256 bytes, which can spell everything that UTF-8 forbids."""

    def __init__(self) -> None:
        info = xgrammar.TokenizerInfo(
            [bytes((byte,)) for byte in range(256)] + [b""],
            xgrammar.VocabType.RAW,
            vocab_size=257,
            stop_token_ids=[256],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self._mask = xgrammar.allocate_token_bitmask(1, 257)

    def compile(self, ebnf: str) -> Any:
        return self._compiler.compile_grammar(ebnf)

    def after(self, grammar: Any, start: Sequence[int]) -> list[int] | None:
        """Bytes that may follow, None if the beginning is not allowed."""
        matcher = xgrammar.GrammarMatcher(grammar)
        if not all(matcher.accept_token(byte) for byte in start):
            return None
        matcher.fill_next_token_bitmask(self._mask, 0)
        bits = numpy.unpackbits(self._mask[0].numpy().view(numpy.uint8), bitorder="little")
        return [int(token) for token in numpy.nonzero(bits)[0] if token < 256]


@pytest.fixture(scope="module")
def spell() -> Bytes:
    return Bytes()


@given(POINTS, POINTS)
def test_parts_cover_the_range_and_are_free_in_every_byte(one: int, other: int) -> None:
    low, high = sorted((one, other))
    parts = list(utf8_ranges(low, high))
    covered = [point for first, last in parts for point in (first, last)]
    assert covered == sorted(covered)
    surrogates = len(range(max(low, SURROGATES.start), min(high + 1, SURROGATES.stop)))
    assert sum(last - first + 1 for first, last in parts) == high - low + 1 - surrogates
    for first, last in parts:
        assert first not in SURROGATES and last not in SURROGATES
        begin, end = chr(first).encode(), chr(last).encode()
        product = 1
        for a, b in zip(begin, end, strict=True):
            product *= b - a + 1
        assert product == last - first + 1


@pytest.mark.parametrize("seed", range(40))
def test_a_set_allows_the_bytes_of_its_characters_and_no_others(spell: Bytes, seed: int) -> None:
    drawn = random.Random(seed)
    low, high = sorted((drawn.choice(EDGES), drawn.randrange(drawn.choice((0x100, 0x900, 0x11000, 0x110000)))))
    characters = [c for c in (low, high, drawn.randint(low, high)) if c not in SURROGATES]
    if not characters:
        return
    grammar = spell.compile(f"root ::= {char_set(((low, high),))}")
    outside = [c for c in (low - 1, high + 1, *EDGES) if not low <= c <= high and 0 <= c <= 0x10FFFF]
    for point in (*characters, *(c for c in outside if c not in SURROGATES)):
        assert (spell.after(grammar, chr(point).encode()) is not None) == (low <= point <= high), hex(point)
    for _ in range(20):
        spelled: list[int] = []
        while allowed := spell.after(grammar, spelled):
            spelled.append(drawn.choice((allowed[0], allowed[-1], drawn.choice(allowed))))
        assert low <= ord(bytes(spelled).decode()) <= high  # decoding is strict


@pytest.mark.parametrize("words", [("名",), ("名", "名字", "é"), ("\ud7ff"[:1], "\uffff", "\U0010ffff"), ("a", "퟿b")])
def test_other_words_than_the_declared_ones_are_characters_too(spell: Bytes, words: tuple[str, ...]) -> None:
    rules = Rules()
    grammar = spell.compile(rules.text(words_except(rules, words, ((0x20, 0x21), (0x23, 0x10FFFF)))))
    drawn = random.Random(7)
    for _ in range(60):
        spelled: list[int] = list(drawn.choice(words).encode()[: drawn.randrange(4)])
        while len(spelled) < 12 and (allowed := spell.after(grammar, spelled)):
            spelled.append(drawn.choice(allowed))
        while spelled[-1] >= 0x80 and not _whole(spelled):
            allowed = spell.after(grammar, spelled)
            assert allowed, bytes(spelled)
            spelled.append(drawn.choice(allowed))
        bytes(spelled).decode()


def _whole(spelled: list[int]) -> bool:
    try:
        bytes(spelled).decode()
    except UnicodeDecodeError as error:
        return error.reason != "unexpected end of data"
    return True


@pytest.mark.parametrize("thinking", [True, False])
def test_turns_of_byte_tokens_are_unicode(toy: K3Tokenizer, thinking: bool) -> None:
    name = {"type": "string", "minLength": 2, "maxLength": 8}
    schema = {"type": "object", "properties": {"名": name}, "required": ["名"]}
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "thinking": thinking}
    request = parse_request({**body, "tool_choice": "required"})
    info = xgrammar.TokenizerInfo(
        toy.grammar_vocabulary(),
        xgrammar.VocabType.RAW,
        vocab_size=toy.vocab_size,
        stop_token_ids=[toy.special.end_of_msg],
    )
    found = constraint(request, request.start)
    assert found is not None
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_structural_tag(found["structural_tag"])
    mask = xgrammar.allocate_token_bitmask(1, toy.vocab_size)
    drawn = random.Random(3)
    high = [token for token in range(256) if token >= 0xC0]
    for _ in range(10):
        matcher, ids = xgrammar.GrammarMatcher(compiled), []
        while not matcher.is_terminated() and len(ids) < 400:
            matcher.fill_next_token_bitmask(mask, 0)
            bits = numpy.unpackbits(mask[0].numpy().view(numpy.uint8), bitorder="little")
            allowed = [int(t) for t in numpy.nonzero(bits)[0] if t < toy.vocab_size]
            assert allowed, toy.decode(ids)
            odd = [token for token in allowed if token in high]
            ids.append(drawn.choice(odd if odd and drawn.random() < 0.3 else allowed))
            assert matcher.accept_token(ids[-1])
        text = b"".join(toy.decode_bytes([t]) for t in ids if not toy.is_special(t))
        assert _decodes(text), text


def _decodes(text: bytes) -> bool:
    """Whether this is UTF-8, perhaps cut inside its last character."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.end == len(text)
    return True


@pytest.mark.parametrize("place", ["argument", "answer"])
def test_a_very_long_name_beside_undeclared_ones_costs_no_grammar(place: str) -> None:
    name = "n" * (5_000 if place == "answer" else 1_000)
    schema = {"type": "object", "properties": {name: {"type": "string"}}, "additionalProperties": {"type": "string"}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    if place == "argument":
        body |= {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
        body |= {"tool_choice": "required"}
    else:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    request = parse_request(body)
    grammar = turn_grammar(request, request.start)
    assert grammar is not None
    assert len(grammar.loosened) == 1 and "256 characters" in grammar.loosened[0]
    schema["additionalProperties"] = False
    exact = turn_grammar(parse_request(body), request.start)
    assert exact is not None and exact.loosened == ()
