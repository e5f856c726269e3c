"""Every way the engine comes to a distribution: prefill whole or in chunks, decode, continuation of a cached prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from k3_sglang.parity.compare import LIMITS, Agreement, Limits, agreement
from k3_sglang.parity.engine import ScoredEngine
from k3_sglang.parity.golden import Golden, Prompt

SNAPSHOT_GRID = 64
"""A prefill keeps the recurrent state at multiples of this many tokens, counted from where the prefill step began."""

TAIL_TOKENS = 24
"""Prompt tokens computed after a prefix hit."""

DECODE_TOKENS = 100

SHORT_TOKENS = 10
"""Prompts below this length have too few positions for one of them to differ in bfloat16."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    dtype: str
    mode: str
    prompt: str
    cached_tokens: int
    agreement: Agreement
    hit_len: int = 0
    """Tokens that had to come from the prefix cache."""
    tokens_equal: bool = True
    """Whether generated tokens are the reference's; only float32 promises it."""
    drawn: bool = True
    """Whether the prompt was drawn without near ties, as the golden ones were."""

    @property
    def limits(self) -> Limits:
        """What this row must keep."""
        limits = LIMITS[self.dtype]
        if self.dtype != "float32" and not self.drawn:
            return replace(limits, top1=0.0)  # bfloat16 decides near ties either way; how many there are is chance
        return replace(limits, top1=1.0) if self.agreement.positions < SHORT_TOKENS else limits

    @property
    def passed(self) -> bool:
        """Whether the row keeps its limits."""
        equal = self.tokens_equal or self.dtype != "float32"
        return equal and self.cached_tokens == self.hit_len and self.agreement.within(self.limits)


def prefill(engine: ScoredEngine, golden: Golden, dtype: str, mode: str, prompts: Sequence[Prompt]) -> Iterator[Row]:
    """Cold prefill, all positions; ``mode`` says what the server's chunk size makes of it."""
    for prompt in prompts:
        engine.flush()
        scores = engine.score(prompt.ids)
        compared = agreement(scores.prompt, golden.logits(prompt, dtype))
        yield Row(dtype, mode, prompt.name, scores.cached_tokens, compared, drawn=bool(prompt.greedy))


def decode(engine: ScoredEngine, golden: Golden, dtype: str) -> Iterator[Row]:
    """Token by token after each golden prompt, then a longer run.

    float32: the golden steps against golden values, the longer run against our reference model on the tokens the engine
    chose. bfloat16: golden data has no steps, and the engine's own tokens hold near ties, so all runs are against our
    reference model and judged together.
    """
    runs = [(prompt, len(prompt.greedy)) for prompt in golden.prompts]
    compared: list[tuple[Tensor, Tensor]] = []
    for prompt, count in [*runs, (golden.prompts[-1], DECODE_TOKENS)]:
        engine.flush()
        scores = engine.score(prompt.ids, new_tokens=count)
        if dtype == "float32" and count == len(prompt.greedy):
            wanted = golden.tensors("greedy_logits")[f"{prompt.name}.greedy_logits"]
        else:
            wanted = _continuation(golden, prompt, scores.output_ids, dtype)
        equal = scores.output_ids[: len(prompt.greedy)] == prompt.greedy
        if dtype == "float32":
            together = agreement(scores.output, wanted)
            yield Row(dtype, f"decode, {count} steps", prompt.name, 0, together, tokens_equal=equal)
        compared.append((scores.output, wanted))
    if dtype != "float32":
        outputs, references = (torch.cat(parts) for parts in zip(*compared, strict=True))
        together = agreement(outputs, references)
        yield Row(dtype, f"decode, {together.positions} steps", "all", 0, together, tokens_equal=False)


def _continuation(golden: Golden, prompt: Prompt, output_ids: tuple[int, ...], dtype: str) -> Tensor:
    """Our reference model's logits that the output's tokens had to be chosen from."""
    return golden.reference_logits(prompt.ids + output_ids[:-1], dtype)[len(prompt.ids) - 1 :]


def after_hit(engine: ScoredEngine, golden: Golden, dtype: str, prompt: Prompt, prefix_len: int, hit_len: int) -> Row:
    """Compute a prefix, then a longer prompt that must continue from the state kept at ``hit_len``.

    All positions from the hit to ``TAIL_TOKENS`` after the prefix are compared.
    """
    engine.flush()
    engine.run(prompt.ids[:prefix_len])
    end = min(len(prompt.ids), prefix_len + TAIL_TOKENS)
    scores = engine.score(prompt.ids[:end], first=hit_len)
    compared = agreement(scores.prompt, golden.logits(prompt, dtype)[hit_len:end])
    mode, drawn = f"after a prefix of {prefix_len}", bool(prompt.greedy)
    return Row(dtype, mode, prompt.name, scores.cached_tokens, compared, hit_len, drawn=drawn)


def prefixes_on_the_grid(prompt: Prompt) -> list[tuple[int, int]]:
    """(prefix length, length of the hit) at every multiple of the grid, for a server that does not cut prompts."""
    return [(n, n) for n in range(SNAPSHOT_GRID, len(prompt.ids) - 1, SNAPSHOT_GRID)]


def prefixes_off_the_grid(prompt: Prompt) -> list[tuple[int, int]]:
    """Prefixes of odd lengths: the checkpoint cache keeps the state at exactly their end."""
    lengths = (65, 67, 95, 101, 127, 129, 131, 189, 191, 193, 199, 257, 511, 777)
    return [(n, n) for n in lengths if n < len(prompt.ids)]


def prefixes_behind_a_chunk(prompt: Prompt, chunk_tokens: int) -> list[tuple[int, int]]:
    """Prefixes of two chunks or more: the grid starts anew at each chunk, so hits lie at lengths no grid explains."""
    lengths = range(chunk_tokens + SNAPSHOT_GRID, len(prompt.ids) - 1, chunk_tokens)
    return [(n, n) for n in lengths]
