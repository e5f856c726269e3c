"""K3's tokenizer: tiktoken over the checkpoint's vocabulary file, control tokens only by id."""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from sys import getsizeof

import tiktoken

from k3_sglang.chat.errors import VocabularyError
from k3_sglang.chat.grammar_rules import FIRST_CONTROL_CODE_POINT
from k3_sglang.chat.types import Segment
from k3_sglang.chat.vocabulary import (
    CONFIG_FILE,
    RELEASE_BASE_TOKENS,
    RELEASE_SPECIAL_TOKENS,
    RELEASE_SPECIALS,
    VOCABULARY_FILE,
    SpecialIds,
    check_ranks,
    protocol_ids,
    read_ranks,
    read_specials,
)

__all__ = ["CONFIG_FILE", "PATTERN", "VOCABULARY_FILE", "IncrementalDecoder", "K3Tokenizer", "SpecialIds"]

# Pre-tokenisation of the released vocabulary: Han runs, words without Han in two casings, up to three
# digits, punctuation, line ends, trailing space, space.
_WORD = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]")
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD[0]}*{_WORD[1]}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD[0]}+{_WORD[1]}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# The reference cuts long inputs before BPE; the cuts change ids, so they are part of the format.
MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
_RUN = re.compile(r"\s+|\S+")
_CHANGE = re.compile(r"\s\S|\S\s")


class K3Tokenizer:
    """Text to ids and back for one K3 vocabulary.

    Ids below `base_tokens` are byte pieces, ids from there to `vocab_size` are control tokens. Ordinary
    text never becomes a control token: the BPE engine is built without any.
    """

    def __init__(self, ranks: dict[bytes, int], specials: dict[int, str], vocab_size: int) -> None:
        """Build from `ranks` (piece to id, dense from 0) and `specials` (id to spelling).

        Raises VocabularyError if a byte has no piece, ids overlap or a token of the protocol is missing.
        """
        self.base_tokens = len(ranks)
        self.vocab_size = vocab_size
        check_ranks(ranks, specials, vocab_size)
        self._encoding = tiktoken.Encoding("kimi-k3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        self._pieces: list[bytes] = sorted(ranks, key=ranks.__getitem__)
        self._spellings = [
            specials.get(token, f"<|reserved_token_{token}|>") for token in range(self.base_tokens, vocab_size)
        ]
        self._special_by_text = {text: self.base_tokens + i for i, text in enumerate(self._spellings)}
        self.special = protocol_ids(self._special_by_text)
        self._pieces.extend(text.encode() for text in self._spellings)
        self._cache: dict[str, tuple[int, ...]] = {}
        self._cache_tokens = 0

    @classmethod
    def from_dir(cls, directory: str | Path) -> "K3Tokenizer":
        """Read `tiktoken.model` and, if there, `tokenizer_config.json`; no code in `directory` is run.

        Without a configuration the vocabulary must be the release's (its special ids are known).
        Raises VocabularyError when a file is missing or is not K3's format.
        """
        folder = Path(directory)
        ranks = read_ranks(folder / VOCABULARY_FILE)
        config = folder / CONFIG_FILE
        if config.is_file():
            specials = read_specials(config)
            return cls(ranks, specials, max(specials, default=-1) + 1)
        if len(ranks) != RELEASE_BASE_TOKENS:
            raise VocabularyError(
                f"{folder} has a vocabulary of {len(ranks)} tokens and no {CONFIG_FILE}; only the release's "
                f"{RELEASE_BASE_TOKENS} tokens work without it. Put the {CONFIG_FILE} beside {VOCABULARY_FILE}."
            )
        return cls(ranks, RELEASE_SPECIALS, RELEASE_BASE_TOKENS + RELEASE_SPECIAL_TOKENS)

    def encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text; control-token spellings in it stay text (every id < `base_tokens`)."""
        if len(text) <= MAX_RUN_CHARS:
            return self._encoding.encode_ordinary(text)
        ids: list[int] = []
        for piece in _cut(text):
            ids.extend(self._encoding.encode_ordinary(piece))
        return ids

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Concatenated ids of segments, each tokenised on its own. Earlier results are remembered."""
        ids: list[int] = []
        cache = self._cache
        special = self._special_by_text
        for text, allow_special, recorded, _ in segments:
            if recorded is not None:
                ids.extend(recorded)
            elif allow_special:
                token = special.get(text)
                if token is None:
                    ids.extend(self._encode_with_specials(text))
                else:
                    ids.append(token)
            else:
                known = cache.get(text)
                ids.extend(self._remember(text) if known is None else known)
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Bytes of ids; control tokens by their spelling. Raises ValueError on an id out of range."""
        pieces = self._pieces
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise ValueError(f"token id {bad} is outside the vocabulary (0 to {self.vocab_size - 1})")
        return b"".join([pieces[token] for token in ids])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token (reserved ones included)."""
        return self.base_tokens <= token_id < self.vocab_size

    def spelling(self, token_id: int) -> str:
        """How a control token is written; raises ValueError for an ordinary token."""
        if not self.is_special(token_id):
            raise ValueError(
                f"token id {token_id} is not a control token ({self.base_tokens} to {self.vocab_size - 1})"
            )
        return self._spellings[token_id - self.base_tokens]

    @property
    def special_ids_by_spelling(self) -> dict[str, int]:
        """Every control token's id by its spelling (a copy)."""
        return dict(self._special_by_text)

    def grammar_vocabulary(self) -> list[bytes]:
        """Pieces by id for a grammar engine, in which only a control token's own rule can match it.

        Control tokens are spelled as the four-byte code points from U+1F0000 on, which Unicode does not have:
        rules about characters cannot match them, a literal of that code point can. The one ordinary piece that
        could begin such a sequence (byte 0xF7, never part of UTF-8) is made unmatchable.
        """
        base = self.base_tokens
        ordinary = [b"\xff" + piece if b"\xf7" in piece else piece for piece in self._pieces[:base]]
        control = [_beyond_unicode(FIRST_CONTROL_CODE_POINT + i) for i in range(self.vocab_size - base)]
        return ordinary + control

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._special_by_text, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def _encode_with_specials(self, text: str) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(self._special_pattern.split(text)):
            if index % 2:
                ids.append(self._special_by_text[part])
            elif part:
                ids.extend(self.encode_text(part))
        return ids

    def _remember(self, text: str) -> tuple[int, ...]:
        """Encode and keep the result of a short text (`EncodeCache` keeps long ones); a full memory starts over."""
        ids = tuple(self.encode_text(text))
        if len(ids) > _CACHE_TEXT_TOKENS:
            return ids
        if self._cache_tokens > _CACHE_TOKENS:
            self._cache.clear()
            self._cache_tokens = 0
        self._cache[text] = ids
        self._cache_tokens += len(ids) + _CACHE_ENTRY_TOKENS + getsizeof(text) // _CACHE_BYTES
        return ids


# About 40 MB at most: 8 bytes per id and 28 for its integer, 36 of a text counted as one more (a token may be 256
# spaces), and each entry as 16.
_CACHE_TOKENS = 1_000_000
_CACHE_TEXT_TOKENS = 256
_CACHE_ENTRY_TOKENS = 16
_CACHE_BYTES = 36


class IncrementalDecoder:
    """Ids to text as they arrive: a character appears once all its bytes have; linear time.

    The concatenated results equal `K3Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Sequence[int]) -> str:
        """Text that is certain after these ids (at most 3 bytes are held back)."""
        return self._utf8.decode(self._tokenizer.decode_bytes(ids))

    def finish(self) -> str:
        """The held-back rest: an unfinished character becomes U+FFFD. The decoder can be used again."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def _beyond_unicode(point: int) -> bytes:
    """Four bytes in UTF-8's pattern; for code points up to 0x1FFFFF, which `str` cannot hold."""
    return bytes((0xF0 | point >> 18, 0x80 | point >> 12 & 63, 0x80 | point >> 6 & 63, 0x80 | point & 63))


def _cut(text: str) -> Iterator[str]:
    """Cut as the reference does: every 400,000 characters, and runs of (non-)space after 25,000."""
    for begin in range(0, len(text), MAX_PIECE_CHARS):
        piece = text[begin : begin + MAX_PIECE_CHARS]
        if not _may_hold_long_run(piece):
            yield piece
            continue
        start = 0
        for run in _RUN.finditer(piece):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield piece[start:cut]
                start = cut
        yield piece[start:]


def _may_hold_long_run(piece: str) -> bool:
    """Cheap test: a run over the limit fills at least one aligned window of half the limit."""
    window = MAX_RUN_CHARS // 2
    return any(
        _CHANGE.search(piece, begin, begin + window) is None for begin in range(0, len(piece) - window + 1, window)
    )
