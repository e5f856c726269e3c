"""Text to ids and back: exactness, control tokens, cuts, incremental decoding, bad files."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3_sglang.chat.errors import VocabularyError
from k3_sglang.chat.tokenizer import MAX_RUN_CHARS, IncrementalDecoder, K3Tokenizer
from k3_sglang.chat.types import Segment

MARKERS = [
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    "[PAD]",
    "[EOS]",
    "<|media_pad|>",
    "<|reserved_token_280|>",
]
hostile_text = st.lists(st.one_of(st.text(max_size=12), st.sampled_from(MARKERS)), max_size=12).map("".join)


@given(hostile_text)
def test_text_never_becomes_a_control_token_and_comes_back(toy: K3Tokenizer, text: str) -> None:
    ids = toy.encode_text(text)
    assert all(token < toy.base_tokens for token in ids)
    assert toy.decode(ids) == text


def test_a_thousand_texts_with_marker_spellings_stay_text_in_the_released_vocabulary(release: K3Tokenizer) -> None:
    for number in range(1000):
        text = MARKERS[number % len(MARKERS)].join((f"a{number} ", "", "\n", MARKERS[number % 3]))
        ids = release.encode_segments([Segment(text)])
        assert max(ids) < release.base_tokens
        assert release.decode(ids) == text


def test_a_segment_that_allows_control_tokens_mixes_them_with_text(toy: K3Tokenizer) -> None:
    ids = toy.encode_segments([Segment("<|media_begin|>image 2x3<|media_end|>", True)])
    assert ids == [toy.special.media_begin, *toy.encode_text("image 2x3"), toy.special.media_end]


def test_a_segment_with_ids_stands_for_them(toy: K3Tokenizer) -> None:
    assert toy.encode_segments([Segment("a"), Segment("", False, (7, 8)), Segment("a")]) == [97, 7, 8, 97]


def test_control_tokens_without_a_name_are_spelled_as_reserved(toy: K3Tokenizer) -> None:
    reserved = toy.special.bos + 6
    assert toy.spelling(reserved) == f"<|reserved_token_{reserved}|>"
    assert toy.decode([reserved]) == f"<|reserved_token_{reserved}|>"
    with pytest.raises(ValueError, match="not a control token"):
        toy.spelling(5)


@given(st.lists(st.integers(0, 290), max_size=60), st.lists(st.integers(1, 7), min_size=1, max_size=60))
def test_incremental_decoding_equals_decoding_at_once(toy: K3Tokenizer, ids: list[int], sizes: list[int]) -> None:
    decoder = IncrementalDecoder(toy)
    text, begin = "", 0
    for size in sizes:
        text += decoder.feed(ids[begin : begin + size])
        begin += size
    text += decoder.feed(ids[begin:]) + decoder.finish()
    assert text == toy.decode(ids)


def test_a_character_appears_with_its_last_byte_and_a_cut_one_as_a_replacement(toy: K3Tokenizer) -> None:
    first, second, third = "€".encode()
    decoder = IncrementalDecoder(toy)
    assert [decoder.feed([first]), decoder.feed([second]), decoder.feed([third])] == ["", "", "€"]
    assert decoder.feed([first, second]) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.feed([97]) == "a"


def test_long_runs_are_cut_every_25000_characters(toy: K3Tokenizer) -> None:
    """Cut pieces are tokenised apart: a merge across the cut does not happen."""
    run = "t" * (MAX_RUN_CHARS - 1) + "th" + "h" * 10
    assert toy.encode_text(run) == [ord("t")] * MAX_RUN_CHARS + [ord("h")] * 11
    assert toy.encode_text(run + " ")[-1] == ord(" ")
    assert toy.encode_text("ab " * 10 + run) != toy.encode_text("ab " * 10)[:1] + toy.encode_text(run)


def test_long_inputs_are_cut_every_400000_characters(toy: K3Tokenizer) -> None:
    text = "a " * 200_000
    whole = toy.encode_text(text[:-1] + "th")
    assert whole[399_999:] == [ord("t"), ord("h")]


def test_encoding_time_grows_linearly(toy: K3Tokenizer) -> None:
    def seconds(chars: int) -> float:
        """Of this process, the least of three: other programs have no part in it."""
        taken: list[float] = []
        for _ in range(3):
            begin = time.process_time()
            toy.encode_text("x" * chars)
            taken.append(time.process_time() - begin)
        return min(taken)

    small = max(seconds(100_000), 0.002)
    assert seconds(1_000_000) < 60 * small


def test_ids_outside_the_vocabulary_are_refused(toy: K3Tokenizer) -> None:
    for bad in (-1, toy.vocab_size):
        with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary"):
            toy.decode([97, bad])


def test_a_full_memory_of_segments_starts_over(toy_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3_sglang.chat.tokenizer._CACHE_TOKENS", 50)
    tokenizer = K3Tokenizer.from_dir(toy_directory)
    for number in range(100):
        assert tokenizer.decode(tokenizer.encode_segments([Segment(f"text {number}")])) == f"text {number}"


def test_the_release_needs_no_tokenizer_configuration(release: K3Tokenizer) -> None:
    assert (release.base_tokens, release.vocab_size) == (163_584, 163_840)
    assert (release.special.end_of_msg, release.special.pad) == (163_586, 163_839)


def test_the_reference_checkpoints_vocabulary_is_read(golden: Path) -> None:
    tokenizer = K3Tokenizer.from_dir(golden / "checkpoint")
    assert (tokenizer.base_tokens, tokenizer.vocab_size, tokenizer.special.open) == (1000, 1024, 1003)


@pytest.mark.parametrize(
    ("vocabulary", "config", "message"),
    [
        (None, None, "does not exist"),
        ("not base64 at all\n", None, "not a tiktoken vocabulary"),
        ("AA== 0\n", None, "only the release's"),
        ("AA== 0\n", {"added_tokens_decoder": {"1": {"content": "[BOS]"}}}, "lacks single bytes"),
        ("AA== 0\n", {"added": 1}, "no usable added_tokens_decoder"),
        ("AA== 0\nAQ== 5\n", {"added_tokens_decoder": {}}, "not dense"),
    ],
)
def test_bad_vocabularies_are_refused(
    tmp_path: Path, vocabulary: str | None, config: dict[str, object] | None, message: str
) -> None:
    if vocabulary is not None:
        (tmp_path / "tiktoken.model").write_text(vocabulary)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(VocabularyError, match=message):
        K3Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("278"), "tokenizer defines no"),
        (lambda d: d.update({"278": d["279"], "279": d["278"]}), "places after"),
        (lambda d: d.update({"3": {"content": "[X]"}}), "lie outside"),
    ],
)
def test_control_tokens_that_are_not_k3s_are_refused(toy_directory: Path, tmp_path: Path, change, message) -> None:
    config = json.loads((toy_directory / "tokenizer_config.json").read_text())
    change(config["added_tokens_decoder"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tiktoken.model").write_bytes((toy_directory / "tiktoken.model").read_bytes())
    with pytest.raises(VocabularyError, match=message):
        K3Tokenizer.from_dir(tmp_path)
