"""K3's vocabulary files: byte pieces and control tokens, read as data and checked."""

import base64
import binascii
import json
from dataclasses import dataclass
from pathlib import Path

from k3_sglang.chat.errors import VocabularyError

VOCABULARY_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

RELEASE_BASE_TOKENS = 163_584
RELEASE_SPECIAL_TOKENS = 256

_SPECIAL_NAMES = {
    "bos": "[BOS]",
    "eos": "[EOS]",
    "end_of_msg": "<|end_of_msg|>",
    "open": "<|open|>",
    "close": "<|close|>",
    "sep": "<|sep|>",
    "media_begin": "<|media_begin|>",
    "media_content": "<|media_content|>",
    "media_end": "<|media_end|>",
    "media_pad": "<|media_pad|>",
    "unk": "[UNK]",
    "pad": "[PAD]",
}
RELEASE_SPECIALS = {
    163_584: "[BOS]",
    163_585: "[EOS]",
    163_586: "<|end_of_msg|>",
    163_587: "<|open|>",
    163_588: "<|close|>",
    163_589: "<|sep|>",
    163_590: "[start_header_id]",
    163_591: "[end_header_id]",
    163_593: "[EOT]",
    163_602: "<|media_begin|>",
    163_603: "<|media_content|>",
    163_604: "<|media_end|>",
    163_605: "<|media_pad|>",
    163_649: "<osagent_mode>",
    163_838: "[UNK]",
    163_839: "[PAD]",
}


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids of the control tokens that the protocol uses."""

    bos: int
    eos: int
    end_of_msg: int
    open: int
    close: int
    sep: int
    media_begin: int
    media_content: int
    media_end: int
    media_pad: int
    unk: int
    pad: int


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read `base64 rank` lines."""
    if not path.is_file():
        raise VocabularyError(f"{path} does not exist; a K3 checkpoint directory holds a {VOCABULARY_FILE}")
    try:
        pairs = (line.split() for line in path.read_bytes().splitlines() if line)
        return {base64.b64decode(piece, validate=True): int(rank) for piece, rank in pairs}
    except (binascii.Error, ValueError) as error:
        raise VocabularyError(f"{path} is not a tiktoken vocabulary (base64 piece, space, rank): {error}") from error


def read_specials(path: Path) -> dict[int, str]:
    """Read `added_tokens_decoder` of a tokenizer configuration."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["added_tokens_decoder"]
        return {int(token): str(entry["content"]) for token, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VocabularyError(f"{path} lists no usable added_tokens_decoder: {error!r}") from error


def check_ranks(ranks: dict[bytes, int], specials: dict[int, str], vocab_size: int) -> None:
    if set(ranks.values()) != set(range(len(ranks))):
        raise VocabularyError(f"vocabulary ranks are not dense: {len(ranks)} pieces, highest {max(ranks.values())}")
    missing = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if missing:
        raise VocabularyError(f"vocabulary lacks single bytes {missing[:8]}; text could not be encoded exactly")
    outside = [token for token in specials if not len(ranks) <= token < vocab_size]
    if outside:
        raise VocabularyError(
            f"control tokens {outside[:8]} lie outside {len(ranks)} to {vocab_size - 1}, the ids after the pieces"
        )


def protocol_ids(by_text: dict[str, int]) -> SpecialIds:
    missing = [text for text in _SPECIAL_NAMES.values() if text not in by_text]
    if missing:
        raise VocabularyError(f"the tokenizer defines no {', '.join(missing)}; K3's protocol needs them")
    special = SpecialIds(**{field: by_text[text] for field, text in _SPECIAL_NAMES.items()})
    places = tuple(token - special.bos for token in (special.end_of_msg, special.open, special.close, special.sep))
    if places != (2, 3, 4, 5):
        raise VocabularyError(
            f"<|end_of_msg|>, <|open|>, <|close|> and <|sep|> stand {places} places after [BOS]; in a K3 vocabulary "
            "they follow it at 2, 3, 4 and 5"
        )
    return special
