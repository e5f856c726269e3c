"""Absorbed latent attention agrees with ordinary multi-head attention over expanded keys and values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3_sglang.kernels import mla
from k3_sglang.kernels.mla import mla_decode, mla_prefill

HEADS, NOPE, ROPE, VALUE, LORA = 4, 24, 16, 20, 32
SCALE = (NOPE + ROPE) ** -0.5


def expanded_attention(q: Tensor, latent: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
    """Textbook attention in float64: q [T, H, nope + rope], latent [S, R], the queries are the last T of S tokens."""
    q, latent, w_k, w_v = q.double(), latent.double(), w_k.double(), w_v.double()
    c, shared = latent[:, :LORA], latent[:, LORA:]
    keys = torch.cat((torch.einsum("sc,hnc->shn", c, w_k), shared[:, None].expand(-1, HEADS, -1)), -1)
    values = torch.einsum("sc,hvc->shv", c, w_v)
    scores = torch.einsum("thd,shd->hts", q, keys) * SCALE
    new, total = scores.shape[1:]
    hidden = torch.ones(new, total).triu(total - new + 1).bool()
    return torch.einsum("hts,shv->thv", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


def absorb(q: Tensor, w_k: Tensor) -> Tensor:
    """Fold the key projection into the queries: [T, H, nope + rope] -> [T, H, LORA + rope]."""
    return torch.cat((torch.einsum("thn,hnc->thc", q[..., :NOPE], w_k), q[..., NOPE:]), -1)


def draw(seed: int, new: int, total: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, latent, w_k, w_v."""
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(new, HEADS, NOPE + ROPE, generator=g),
        torch.randn(total, LORA + ROPE, generator=g),
        torch.randn(HEADS, NOPE, LORA, generator=g) * LORA**-0.5,
        torch.randn(HEADS, VALUE, LORA, generator=g) * LORA**-0.5,
    )


@pytest.fixture(autouse=True)
def fresh_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``new_empty`` return NaN, so that a value read before it is written shows."""
    original = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *size, **kw: original(self, *size, **kw).fill_(float("nan")))


@pytest.mark.parametrize("prefix", [0, 1, 63, 200])
@pytest.mark.parametrize("new", [1, 2, 17, 64, 65, 130])
def test_prefill_equals_expanded_attention(new: int, prefix: int) -> None:
    q, latent, w_k, w_v = draw(new * 1000 + prefix, new, prefix + new)
    attended = mla_prefill(absorb(q, w_k), latent, prefix, LORA, SCALE)
    output = torch.einsum("thc,hvc->thv", attended, w_v)
    torch.testing.assert_close(output, expanded_attention(q, latent, w_k, w_v).float(), rtol=1e-5, atol=1e-5)


def test_blocks_of_queries_shrink_with_the_context_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, latent, w_k, _ = draw(3, 50, 90)
    whole = mla_prefill(absorb(q, w_k), latent, 40, LORA, SCALE)
    monkeypatch.setattr(mla, "_SCORE_ELEMENTS", 3 * HEADS * 90)
    torch.testing.assert_close(mla_prefill(absorb(q, w_k), latent, 40, LORA, SCALE), whole)


def test_prefill_refuses_a_latent_of_the_wrong_length() -> None:
    q, latent, w_k, _ = draw(0, 5, 9)
    with pytest.raises(ValueError, match="latent has 9 rows; prefix_len 3 and 5 new tokens need 8"):
        mla_prefill(absorb(q, w_k), latent, 3, LORA, SCALE)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6), seed=st.integers(0, 2**31), one_by_one=st.booleans()
)
def test_decode_of_many_sequences_equals_each_alone(lengths: list[int], seed: int, one_by_one: bool) -> None:
    q, _, w_k, w_v = draw(seed, len(lengths), 1)
    pool = torch.full((400, LORA + ROPE), float("nan"))
    order = torch.randperm(400)
    rows = torch.full((len(lengths), max(lengths) + 3), 2**30, dtype=torch.int32)  # stale entries, out of range
    latents, start = [], 0
    for i, length in enumerate(lengths):
        rows[i, :length] = order[start : start + length]
        latents.append(draw(seed + i, 1, length)[1])
        pool[order[start : start + length]] = latents[-1]
        start += length
    with pytest.MonkeyPatch.context() as patch:
        if one_by_one:
            patch.setattr(mla, "_PADDED_ELEMENTS", 0)
        attended = mla_decode(absorb(q, w_k), pool, rows, lengths, LORA, SCALE)
    for i, latent in enumerate(latents):
        output = torch.einsum("hc,hvc->hv", attended[i], w_v)
        expected = expanded_attention(q[i : i + 1], latent, w_k, w_v)[0].float()
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [[0, 3], [2, 9]])
def test_decode_refuses_lengths_outside_the_rows(lengths: list[int]) -> None:
    q, latent, w_k, _ = draw(0, 2, 8)
    with pytest.raises(ValueError, match="each must be between 1 and the 8 rows given"):
        mla_decode(absorb(q, w_k), latent, torch.zeros(2, 8, dtype=torch.int32), lengths, LORA, SCALE)


def test_bfloat16_inputs_give_bfloat16_outputs_near_the_exact_ones() -> None:
    q, latent, w_k, _ = draw(5, 9, 30)
    exact = mla_prefill(absorb(q, w_k), latent, 21, LORA, SCALE)
    rounded = mla_prefill(absorb(q, w_k).bfloat16(), latent.bfloat16(), 21, LORA, SCALE)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05)
