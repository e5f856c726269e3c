"""Strings under a turn grammar: no byte that is no character, sets without one, and masks in time."""

import time
from typing import Any

import pytest

from k3_sglang.chat.grammar_rules import char_set, without
from k3_sglang.chat.grammar_strings import TEXT
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Segment
from tests.chat.grammar_engine import Engine
from tests.chat.grammar_turns import REQUIRED, asks, closed, opened


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
