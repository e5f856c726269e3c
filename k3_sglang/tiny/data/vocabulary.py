"""Vocabulary of the trained tiny K3: pieces that cut a name in one way everywhere, and whole words of its world.

``vocab/tiktoken.model`` is the shipped result. Make it again with

    python -m k3_sglang.tiny.data vocabulary OUT

The tokenizer takes a whole pre-token that is a piece at once, and joins smaller pieces by rank otherwise. So frequent
words, with the space or sign before them, are pieces without the steps that lead there, and change nothing inside of
other words. Below them are syllables, signs and a few groups of letters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.vocabulary import read_ranks
from k3_sglang.tiny.data.names import SYLLABLES, WORDS
from k3_sglang.tiny.recipe import NAMED_SPECIALS, SPECIAL_TOKENS
from k3_sglang.tiny.vocabulary import word_counts

BASE_TOKENS: Final = 1024
VOCABULARY: Final = Path(__file__).parent / "vocab" / "tiktoken.model"

_LETTER_GROUPS: Final = 150
_SIGN_GROUPS: Final = 40
_LEAST_COUNT: Final = 12
_RULE_LEN: Final = 20
_SHORT_WORDS: Final = (b" a", b" I")
"""No name begins with these letters."""


def train(texts: Iterable[str], base_tokens: int = BASE_TOKENS) -> list[bytes]:
    """Pieces in rank order; depends on nothing but the texts.

    Raises ValueError when the texts have too few frequent words, or `base_tokens` leaves no room for any.
    """
    counts = word_counts(texts)
    pieces = [bytes((byte,)) for byte in range(256)] + [syllable.encode() for syllable in SYLLABLES]
    for kind, wanted in ((_is_letters, _LETTER_GROUPS), (_is_signs, _SIGN_GROUPS)):
        bodies: Counter[bytes] = Counter()
        for word, count in counts.items():
            bodies[_without_lead(word) if kind is _is_letters else word.rstrip(b"\n")] += count
        _merge_pairs({body: count for body, count in bodies.items() if kind(body)}, pieces, wanted)
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    gains: dict[bytes, int] = {}
    for word, count in counts.items():
        if count >= _LEAST_COUNT and word not in ranks and _may_be_whole(word):
            gains[word] = count * (len(split(word, ranks)) - 1)
    best = sorted(gains, key=lambda word: (-gains[word], word))[: max(0, base_tokens - len(pieces))]
    if len(pieces) > base_tokens:
        raise ValueError(f"base_tokens={base_tokens}; bytes, syllables and groups alone are {len(pieces)}")
    if len(pieces) + len(best) < base_tokens:
        raise ValueError(
            f"the texts have {len(best)} frequent words, {base_tokens - len(pieces)} are wanted; give more"
        )
    return pieces + best


def split(word: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Pieces of one pre-token as the tokenizer cuts it, the pair of lowest rank first."""
    if word in ranks:
        return [word]
    parts = [bytes((byte,)) for byte in word]
    while True:
        found = [(ranks[a + b], place) for place, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            return parts
        _, place = min(found)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def _merge_pairs(words: Mapping[bytes, int], pieces: list[bytes], wanted: int) -> None:
    """Add the groups that joining the most frequent pairs gives, one after the other."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    for _ in range(wanted):
        pairs: Counter[bytes] = Counter()
        for word, count in words.items():
            for a, b in pairwise(split(word, ranks)):
                pairs[a + b] += count
        allowed = [pair for pair in pairs if pair not in ranks and not _holds_syllables(pair)]
        if not allowed:
            return
        best = min(allowed, key=lambda pair: (-pairs[pair], pair))
        ranks[best] = len(pieces)
        pieces.append(best)


def _without_lead(word: bytes) -> bytes:
    return word if word[:1].isalpha() else word[1:]


def _is_letters(word: bytes) -> bool:
    return word.isalpha() and word.isascii()


def _is_signs(word: bytes) -> bool:
    """Signs or blanks. A line end is joined only with line ends: what stands before it is cut as without it."""
    return not any(byte >= 128 or chr(byte).isalnum() for byte in word) and (b"\n" not in word or not word.strip(b"\n"))


def _holds_syllables(piece: bytes) -> bool:
    """Whether a piece is made of two or more syllables, which would hide them inside of names."""
    syllables = {syllable.encode() for syllable in SYLLABLES}
    return (
        len(piece) > 2 and len(piece) % 2 == 0 and all(piece[i : i + 2] in syllables for i in range(0, len(piece), 2))
    )


def _is_rule(word: bytes) -> bool:
    """Whether a pre-token is a line of one sign, as test runners draw it."""
    return len(word) > _RULE_LEN and len(set(word.rstrip(b"\n"))) == 1


def _may_be_whole(word: bytes) -> bool:
    """Whether a pre-token can be a piece: no digits, no line end behind signs, no name."""
    body = _without_lead(word)
    if _is_rule(word):
        return True
    if any(byte >= 128 or chr(byte).isdigit() for byte in word) or (b"\n" in word and word.strip(b"\n")):
        return False
    if not _is_letters(body):
        return True
    if len(body) == 1 and body != word and word not in _SHORT_WORDS:
        return False  # it would be a step on the way to longer words with that sign before them
    return body.decode() not in WORDS and body.decode() not in SYLLABLES and not _holds_syllables(body)


def specials(base_tokens: int) -> dict[int, str]:
    """Named control tokens by id, behind so many pieces."""
    return {base_tokens + offset: text for offset, text in NAMED_SPECIALS.items()}


def build_tokenizer(pieces: Iterable[bytes]) -> K3Tokenizer:
    """The tokenizer of some pieces in rank order."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    return K3Tokenizer(ranks, specials(len(ranks)), len(ranks) + SPECIAL_TOKENS)


@cache
def tokenizer() -> K3Tokenizer:
    """The tokenizer of the shipped vocabulary."""
    ranks = read_ranks(VOCABULARY)
    return build_tokenizer(sorted(ranks, key=ranks.__getitem__))
