"""Vocabularies and parse-in-every-way helpers for the chat protocol's tests."""

import base64
import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from k3_sglang.chat.events import (
    CallArgumentsDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    Event,
    ParsedCall,
    ParsedTurn,
    ReasoningDelta,
)
from k3_sglang.chat.parse import TurnParser
from k3_sglang.chat.tokenizer import IncrementalDecoder, K3Tokenizer
from k3_sglang.chat.types import Segment
from k3_sglang.tiny.checkpoint import VOCABULARY
from k3_sglang.tiny.recipe import TOKENIZER_CONFIG

if TYPE_CHECKING:
    from tests.chat.grammar_engine import Engine

_SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    7: "<|media_begin|>",
    8: "<|media_content|>",
    9: "<|media_end|>",
    10: "<|media_pad|>",
    14: "[UNK]",
    15: "[PAD]",
}
# Pairs merged in this order: enough for multi-byte pieces inside words, markers' spellings and UTF-8.
_MERGES = ["th", "in", "er", "st", "re", "ing", "<|", "|>", "ar", "arg", " t", " the", "me", "ss", "co", "\n\n"]


def write_toy_vocabulary(folder: Path) -> None:
    """Write a vocabulary of bytes and a few merges in the release's file format."""
    pieces = [bytes((byte,)) for byte in range(256)] + [merge.encode() for merge in _MERGES]
    pieces += ["é".encode(), "你".encode()[:2], "你".encode()]
    lines = (f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces))
    (folder / "tiktoken.model").write_text("".join(lines), encoding="ascii")
    decoder = {str(len(pieces) + place): {"content": text, "special": True} for place, text in _SPECIALS.items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.fixture(scope="session")
def toy_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory that holds only the toy vocabulary."""
    folder = tmp_path_factory.mktemp("toy_vocabulary")
    write_toy_vocabulary(folder)
    return folder


@pytest.fixture(scope="session")
def toy(toy_directory: Path) -> K3Tokenizer:
    """The toy vocabulary's tokenizer: 275 ordinary tokens, 16 control tokens."""
    return K3Tokenizer.from_dir(toy_directory)


@pytest.fixture(scope="session")
def release(shared_k3: Path) -> K3Tokenizer:
    """The released vocabulary's tokenizer."""
    return K3Tokenizer.from_dir(shared_k3)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> K3Tokenizer:
    """The tokenizer of the tiny model that comes with the package."""
    folder = tmp_path_factory.mktemp("tiny_vocabulary")
    (folder / "tiktoken.model").write_bytes(VOCABULARY.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG), encoding="utf-8")
    return K3Tokenizer.from_dir(folder)


@pytest.fixture(scope="session", params=["toy", "tiny", "release"])
def vocabulary(request: pytest.FixtureRequest) -> K3Tokenizer:
    """Each of the vocabularies in turn."""
    return request.getfixturevalue(request.param)


def counting_ids() -> Callable[[], str]:
    """Call ids c0, c1, ..."""
    numbers = count()
    return lambda: f"c{next(numbers)}"


def assemble(events: Sequence[Event]) -> tuple[str, str, tuple[ParsedCall, ...]]:
    """Reasoning, content and calls as a streaming client puts them together."""
    reasoning, content = "", ""
    starts: dict[int, CallStart] = {}
    arguments: dict[int, str] = {}
    ends: dict[int, CallEnd] = {}
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning += text
            case ContentDelta(text):
                content += text
            case CallStart(index):
                assert index == len(starts), "calls must start in order and once"
                starts[index], arguments[index] = event, ""
            case CallArgumentsDelta(index, piece):
                assert index in starts and index not in ends
                arguments[index] += piece
            case CallEnd(index):
                assert index in starts and index not in ends
                ends[index] = event
    assert starts.keys() == ends.keys(), "every started call must end"
    for index, end in ends.items():
        assert arguments[index] == end.arguments, "pieces must concatenate to the final arguments"
        assert isinstance(json.loads(end.arguments), dict)
    calls = tuple(ParsedCall(s.id, s.name, ends[i].arguments, ends[i].complete) for i, s in starts.items())
    return reasoning, content, calls


def pieces_of(sequence: Any, size: int | None) -> Iterator[Any]:
    """The sequence in pieces of `size`, whole if None."""
    step = size or max(len(sequence), 1)
    return (sequence[i : i + step] for i in range(0, len(sequence), step))


_SPELLINGS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
_CUT_MARKER = re.compile("(?:" + "|".join(re.escape(s[:n]) for s in _SPELLINGS for n in range(2, len(s))) + ")$")

ParseEveryWay = Callable[..., ParsedTurn]


@pytest.fixture
def parse_every_way(toy: K3Tokenizer) -> ParseEveryWay:
    """Parses output text given with marker spellings, as text and as ids: whole and by 1, 3 and 7 of them.

    Ids by one are token boundaries; text is cut at those too.
    """

    def run(text: str, *, start: str = "think", reason: str = "length", **options: Any) -> ParsedTurn:
        # Only text can be cut inside a marker; ids hold it whole or not at all.
        ids = toy.encode_segments([Segment(_CUT_MARKER.sub("", text), True)])
        results: list[ParsedTurn] = []
        decoder = IncrementalDecoder(toy)
        by_token = [decoder.feed([token]) for token in toy.encode_segments([Segment(text, True)])] + [decoder.finish()]
        wholes: tuple[tuple[str, Any], ...] = (("text", text), ("ids", ids))
        runs: list[tuple[str, list[Any]]] = [("text", by_token)]
        runs += [(mode, list(pieces_of(whole, size))) for size in (None, 1, 3, 7) for mode, whole in wholes]
        for mode, pieces in runs:
            parser = TurnParser(toy, start=start, new_call_id=counting_ids(), **options)  # type: ignore[arg-type]
            feed: Callable[[Any], list[Event]] = parser.feed_text if mode == "text" else parser.feed
            events = [event for piece in pieces for event in feed(piece)]
            events += parser.finish(reason)  # type: ignore[arg-type]
            turn = parser.turn
            assert assemble(events) == (turn.reasoning, turn.content, turn.calls), (mode, len(pieces))
            results.append(turn)
        assert all(turn == results[0] for turn in results), results
        return results[0]

    return run


@pytest.fixture(scope="module")
def engine(toy: K3Tokenizer) -> "Engine":
    """Compiles grammars over the toy vocabulary; what needs it skips where xgrammar is absent."""
    from tests.chat.grammar_engine import Engine

    return Engine(toy)


@pytest.fixture
def accepts(engine: "Engine") -> Callable[..., bool]:
    """Whether a request's grammar takes a text."""
    return lambda request, text, **options: engine.accepts(engine.matcher(request, **options), text)
