"""The golden checkpoint in the release's layout, served by the engine, against values of the released reference.

Every way the engine comes to a distribution is compared over the whole vocabulary: prefill in one piece and in chunks,
decode, continuation of a cached prefix; float32 and bfloat16. ``benchmarks/parity.py`` prints the same as a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from k3_sglang.parity import modes
from k3_sglang.parity.engine import ScoredEngine
from k3_sglang.parity.golden import Golden
from k3_sglang.parity.modes import Row
from tests.engine.conftest import CHUNK_TOKENS, golden_arguments, two_free_ports
from tests.engine.stack import Engine, running

PROMPTS = ("len1", "len7", "len64", "len200")
BF16_CHUNK_TOKENS = 64


@pytest.fixture(scope="module")
def data(golden: Path) -> Golden:
    """Golden prompts and values."""
    return Golden(golden)


@pytest.fixture
def whole(golden_engine: Engine, data: Golden) -> ScoredEngine:
    """float32, a prompt in one piece."""
    return ScoredEngine(golden_engine.http, data.config.text.vocab_size)


@pytest.fixture
def chunked(chunked_engine: Engine, data: Golden) -> ScoredEngine:
    """float32, SGLang's cache, prompts cut into chunks that are no multiple of its snapshot grid."""
    return ScoredEngine(chunked_engine.http, data.config.text.vocab_size)


@pytest.fixture(scope="module")
def bf16(data: Golden) -> Iterator[ScoredEngine]:
    """bfloat16, prompts cut into chunks of a size of their own."""
    arguments = [*golden_arguments(data.directory, "bfloat16"), "--chunked-prefill-tokens", str(BF16_CHUNK_TOKENS)]
    with running(arguments, *two_free_ports()) as stack:
        client = Engine(stack.engine_url)
        with client.http:
            yield ScoredEngine(client.http, data.config.text.vocab_size)


def passed(rows: list[Row]) -> bool:
    """Whether every row keeps its limits; the assertion shows those that do not."""
    assert rows
    assert [row for row in rows if not row.passed] == []
    return True


@pytest.mark.parametrize("name", PROMPTS)
def test_24_greedy_tokens_equal_the_reference_cold_and_after_a_prefix_hit(
    golden_engine: Engine, data: Golden, name: str
) -> None:
    golden_engine.flush()
    prompt = data.prompt(name)
    for _ in range(2):
        assert golden_engine.generate(prompt.ids, len(prompt.greedy)).ids == prompt.greedy


def test_prefill_in_one_piece_gives_the_reference_at_every_position(whole: ScoredEngine, data: Golden) -> None:
    rows = list(modes.prefill(whole, data, "float32", "one piece", data.prompts))
    assert passed(rows)
    assert [(row.agreement.positions, row.cached_tokens) for row in rows] == [(1, 0), (7, 0), (64, 0), (200, 0)]


def test_decoding_gives_the_reference_at_every_step(whole: ScoredEngine, data: Golden) -> None:
    rows = list(modes.decode(whole, data, "float32"))
    assert passed(rows)
    assert [row.agreement.positions for row in rows] == [24, 24, 24, 24, modes.DECODE_TOKENS]


def test_a_hit_at_every_multiple_of_64_continues_as_the_reference_does(whole: ScoredEngine, data: Golden) -> None:
    for prompt in (data.prompt("len200"), data.long_prompt):
        for prefix_len, hit_len in modes.prefixes_on_the_grid(prompt):
            row = modes.after_hit(whole, data, "float32", prompt, prefix_len, hit_len)
            assert passed([row])
            assert row.cached_tokens == prefix_len


def test_a_prefix_of_odd_length_continues_from_exactly_its_end(whole: ScoredEngine, data: Golden) -> None:
    for prompt in (data.prompt("len200"), data.long_prompt):
        for prefix_len, hit_len in modes.prefixes_off_the_grid(prompt):
            row = modes.after_hit(whole, data, "float32", prompt, prefix_len, hit_len)
            assert passed([row])
            assert row.cached_tokens == hit_len


def test_prefill_in_chunks_gives_the_reference_at_every_position(chunked: ScoredEngine, data: Golden) -> None:
    prompts = (data.prompt("len200"), data.long_prompt)
    rows = list(modes.prefill(chunked, data, "float32", f"chunks of {CHUNK_TOKENS}", prompts))
    assert passed(rows)
    assert [row.agreement.positions for row in rows] == [200, 1000]


def test_hits_inside_later_chunks_continue_as_the_reference_does(chunked: ScoredEngine, data: Golden) -> None:
    """The grid starts anew at each chunk, so these states lie at 164, 264, ... tokens."""
    for prompt in (data.prompt("len200"), data.long_prompt):
        for prefix_len, hit_len in modes.prefixes_behind_a_chunk(prompt, CHUNK_TOKENS):
            row = modes.after_hit(chunked, data, "float32", prompt, prefix_len, hit_len)
            assert passed([row])
            assert row.cached_tokens == hit_len


def test_bf16_keeps_the_tolerance_of_the_golden_data(bf16: ScoredEngine, data: Golden) -> None:
    rows = list(modes.prefill(bf16, data, "bfloat16", f"chunks of {BF16_CHUNK_TOKENS}", data.prompts))
    rows += modes.decode(bf16, data, "bfloat16")
    prompt = data.prompt("len200")
    hits = [modes.after_hit(bf16, data, "bfloat16", prompt, *lens) for lens in modes.prefixes_on_the_grid(prompt)]
    assert passed(rows + hits)
    assert [row.cached_tokens for row in hits] == [64, 128, 192]
