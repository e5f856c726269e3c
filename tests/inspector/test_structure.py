"""Ids to blocks and pieces: nothing is lost or counted twice, whatever a model wrote; calls counted; text as markup."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.inspector.html import element, page_bytes, visible
from agent_runtime.inspector.structure import blocks, call_tokens, pieces
from k3_sglang.chat.encode import encode
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Channel
from tests.gateway.bodies import chat_with_tool, user
from tests.gateway.vocabulary import TurnWriter, byte_tokenizer

TOKENIZER = byte_tokenizer()
SPECIAL = TOKENIZER.special
STRUCTURE = st.sampled_from([
    [SPECIAL.open, *b"message", SPECIAL.sep],
    [SPECIAL.open, *b'message role="tool" tool="a"', SPECIAL.sep],
    [SPECIAL.close, *b"message", SPECIAL.sep, SPECIAL.end_of_msg],
    [SPECIAL.open, *b"tools", SPECIAL.sep],
    [SPECIAL.close, *b"tools", SPECIAL.sep],
    [SPECIAL.open, SPECIAL.open, SPECIAL.close],
    [SPECIAL.media_begin, *b"image 3x3", SPECIAL.media_content, SPECIAL.media_pad, SPECIAL.media_end],
])  # fmt: skip
RUNS = st.one_of(STRUCTURE, st.lists(st.integers(32, 126), max_size=8), st.lists(st.integers(256, 267), max_size=3))
IDS = st.lists(RUNS, max_size=30).map(lambda runs: [token for run in runs for token in run])
STARTS = st.sampled_from([None, "think", "response"])
CALL = ("look", (("at", "string", "it"),))


@given(IDS, STARTS)
def test_blocks_cover_all_ids_and_their_pieces_say_all_of_them(ids: list[int], start: Channel | None) -> None:
    found = blocks(ids, TOKENIZER, start)
    assert [token for block in found for token in ids[block.start : block.end]] == ids
    for block in found:
        parts = pieces(ids, block, TOKENIZER)
        assert sum(piece.tokens for piece in parts) == block.tokens > 0
        assert "".join(piece.text for piece in parts) == TOKENIZER.decode(ids[block.start : block.end])


@given(IDS)
def test_calls_have_some_of_the_tokens_and_never_more_than_there_are(ids: list[int]) -> None:
    counted = call_tokens(ids, TOKENIZER)
    assert 0 <= counted <= len(ids)
    opened = TOKENIZER.decode([SPECIAL.open, *b"tools"])
    assert bool(counted) <= (opened in TOKENIZER.decode(ids))


@pytest.mark.parametrize("calls", [1, 3])
def test_tokens_of_calls_are_those_between_the_opening_and_the_closing_tag(calls: int) -> None:
    writer = TurnWriter(TOKENIZER)
    plain = writer.turn("thoughts", "text")
    whole = writer.turn("thoughts", "text", (CALL,) * calls)
    assert call_tokens(plain, TOKENIZER) == 0
    assert call_tokens(whole, TOKENIZER) == len(whole) - len(plain)
    cut = whole[: len(plain) + 20]  # the end of the message is not there
    assert call_tokens(cut, TOKENIZER) == len(cut) - (len(plain) - len(TOKENIZER.encode_text("message")) - 3)


def test_a_prompt_has_a_block_for_each_message_with_its_role() -> None:
    request = parse_request({**chat_with_tool(), "messages": [user("a"), user("<|open|>message<|sep|>")]})
    ids = encode(request, TOKENIZER).ids
    found = blocks(ids, TOKENIZER)
    assert [block.role for block in found] == ["system", "system", "user", "user", "assistant"]
    texts = [piece.text for piece in pieces(ids, found[3], TOKENIZER) if piece.kind == "text"]
    assert texts == ["<|open|>message<|sep|>"]


def test_channels_are_those_of_the_tags_around_them() -> None:
    ids = TurnWriter(TOKENIZER).turn("thoughts", "text", (CALL,))
    (block,) = blocks(ids, TOKENIZER, "think")
    said = {piece.channel: piece.text for piece in pieces(ids, block, TOKENIZER) if piece.kind == "text"}
    assert said == {"think": "thoughts", "response": "text", "argument": "it"}


def test_a_vocabulary_of_pieces_longer_than_a_byte_is_read_alike(tokenizer: K3Tokenizer) -> None:
    ids = tokenizer.encode_text("ein Satz mit ü")
    (block,) = blocks(ids, tokenizer)
    assert (block.role, block.tag) == ("", "")
    assert "".join(piece.text for piece in pieces(ids, block, tokenizer)) == "ein Satz mit ü"


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.values: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag == "p"
        self.values += [value for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.found.append(data)


@given(st.text())
def test_any_text_is_read_as_the_same_text(text: str) -> None:
    parser = _Text()
    parser.feed(page_bytes(element("p", text, title=text)).decode())
    parser.close()
    shown = visible(text)
    assert "".join(parser.found) == shown
    assert parser.values == [shown]
    assert all(ord(character) >= 32 or character in "\t\n" for character in shown)


def test_halves_of_pairs_are_spelled_out() -> None:
    assert page_bytes(element("p", "\ud800")) == b"<p>\\ud800</p>"
