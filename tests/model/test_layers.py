"""The served model's layers against the plain reference module, piece by piece."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.config import MoEConfig, SituConfig
from k3_sglang.layers.attn_residual import ResidualBank
from k3_sglang.layers.experts import PER_TOKEN_MAX, run_experts
from k3_sglang.layers.moe import route
from k3_sglang.layers.norm import gated_rms_norm, rms_norm
from k3_sglang.layers.parallel import Ranks
from k3_sglang.layers.situ import situ_glu
from k3_sglang.reference import ops

EPS = 1e-5
SITU = SituConfig(beta=4.0, linear_beta=25.0)
MOE = MoEConfig(
    num_experts=8,
    experts_per_token=3,
    num_shared_experts=2,
    intermediate_size=12,
    latent_size=10,
    renormalize=True,
    routed_scaling_factor=1.0,
)


def close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Same shape and dtype, values within ``tolerance`` of the largest wanted value."""
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    limit = tolerance * max(1.0, wanted.abs().max().item())
    assert (got.float() - wanted.float()).abs().max().item() <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_rounds_where_the_reference_rounds(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(5, 64) * 0.01).to(dtype), torch.randn(64).to(dtype)
    assert torch.equal(rms_norm(x, weight, EPS), ops.rms_norm(x, weight, EPS))


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_the_bank_mixes_like_the_reference_at_every_depth(tokens: int, blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = 16

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    stream = random(tokens, width)
    bank, rows = ResidualBank(tokens, blocks, stream, EPS), []
    for _ in range(blocks):
        bank.freeze(stream)
        rows.append(stream)
        stream = random(tokens, width)
        norm, projection = random(width), random(1, width)
        wanted = ops.mixture([*rows, stream], norm, projection, EPS)
        close(bank.mix(stream, norm * projection.flatten()), wanted, 1e-5)
    assert bank.num_frozen == blocks
    with pytest.raises(ValueError, match="all are frozen already"):
        bank.freeze(stream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_situ_is_bounded_and_rounds_once(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    gate, up = (torch.randn(2, 7, 9) * 50).to(dtype)
    got = situ_glu(torch.cat((gate, up), -1), SITU)
    wide = 4 * torch.tanh(gate.float() / 4) * torch.sigmoid(gate.float()) * 25 * torch.tanh(up.float() / 25)
    close(got, wide.to(dtype))
    assert got.abs().max() <= 100


def test_the_correction_bias_chooses_experts_but_never_weighs_them() -> None:
    torch.manual_seed(2)
    x, gate = torch.randn(4, 16), torch.randn(8, 16)
    bias = torch.zeros(8)
    bias[5] = 10.0
    ids, weights = route(x, gate, bias, MOE)
    assert (ids == 5).any(-1).all()
    scores = torch.sigmoid(x @ gate.t()).gather(-1, ids)
    close(weights, scores / scores.sum(-1, keepdim=True))


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("tokens", [1, PER_TOKEN_MAX, PER_TOKEN_MAX + 1, 13, 40])
def test_few_and_many_tokens_give_the_sum_over_chosen_experts(tokens: int, one_sided: bool) -> None:
    """Balanced routing takes the batched form; with all tokens on the same experts padding would waste too much."""
    torch.manual_seed(tokens)
    latent = torch.randn(tokens, MOE.latent_size)
    w13 = torch.randn(MOE.num_experts, 2 * MOE.intermediate_size, MOE.latent_size)
    w2 = torch.randn(MOE.num_experts, MOE.latent_size, MOE.intermediate_size)
    ids = torch.stack([torch.randperm(MOE.num_experts)[: MOE.experts_per_token] for _ in range(tokens)])
    if one_sided:
        ids[:] = ids[0].clone()
    weights = torch.rand(tokens, MOE.experts_per_token)
    wanted = torch.zeros(tokens, MOE.latent_size)
    for t in range(tokens):
        for expert, share in zip(ids[t].tolist(), weights[t], strict=True):
            wanted[t] += share * (w2[expert] @ situ_glu(w13[expert] @ latent[t], SITU))
    close(run_experts(latent, ids, weights, w13, w2, SITU), wanted, 1e-5)


def test_the_gated_output_norm_is_fp32_inside() -> None:
    torch.manual_seed(3)
    o, gate, weight = torch.randn(3, 2, 8).bfloat16(), torch.randn(3, 16).bfloat16(), torch.randn(8)
    wide = o.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight
    wanted = (normed * torch.sigmoid(gate.float().view(3, 2, 8))).flatten(-2).bfloat16()
    assert torch.equal(gated_rms_norm(o, gate, weight, EPS), wanted)


def test_ranks_split_evenly_or_say_what_does_not_divide() -> None:
    whole = torch.arange(12).view(6, 2)
    parts = [Ranks(rank, 3).rows(whole) for rank in range(3)]
    assert torch.equal(torch.cat(parts), whole)
    with pytest.raises(ValueError, match="KDA heads = 96 cannot be split over 5"):
        Ranks(0, 5).share(96, "KDA heads")
