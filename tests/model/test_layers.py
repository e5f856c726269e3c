"""The served model's layers against the plain reference module, piece by piece."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.config import MoEConfig, SituConfig
from k3_sglang.kernels import mxfp4
from k3_sglang.layers.attn_residual import ResidualBank
from k3_sglang.layers.expert_weights import PackedExperts, UnpackedExperts, choose_format
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
    experts = UnpackedExperts(MOE, Ranks())
    w13, w2 = experts.w13.normal_(), experts.w2.normal_()
    ids = torch.stack([torch.randperm(MOE.num_experts)[: MOE.experts_per_token] for _ in range(tokens)])
    if one_sided:
        ids[:] = ids[0].clone()
    weights = torch.rand(tokens, MOE.experts_per_token)
    wanted = torch.zeros(tokens, MOE.latent_size)
    for t in range(tokens):
        for expert, share in zip(ids[t].tolist(), weights[t], strict=True):
            wanted[t] += share * (w2[expert] @ situ_glu(w13[expert] @ latent[t], SITU))
    close(run_experts(latent, ids, weights, experts, SITU), wanted, 1e-5)


@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_packed_experts_compute_exactly_what_unpacked_ones_do(tokens: int) -> None:
    moe = replace(MOE, intermediate_size=32, latent_size=64)
    packed, unpacked = PackedExperts(moe, Ranks()), UnpackedExperts(moe, Ranks())
    torch.manual_seed(tokens)
    for name, values in (("w13", unpacked.w13.normal_()), ("w2", unpacked.w2.normal_())):
        codes, scales = mxfp4.encode(values)
        getattr(packed, f"{name}_codes").copy_(codes)
        getattr(packed, f"{name}_scales").copy_(scales)
        values.copy_(mxfp4.decode(codes, scales))
    latent, weights = torch.randn(tokens, moe.latent_size), torch.rand(tokens, 3)
    ids = torch.stack([torch.randperm(moe.num_experts)[:3] for _ in range(tokens)])
    got = run_experts(latent, ids, weights, packed, SITU)
    assert torch.equal(got, run_experts(latent, ids, weights, unpacked, SITU))


@pytest.mark.parametrize("tokens", [1, 2, 3, 40])
@pytest.mark.parametrize(("size", "expert_parallel"), [(2, 1), (2, 2), (4, 2), (8, 8)])
def test_the_parts_of_all_ranks_sum_to_the_whole(tokens: int, size: int, expert_parallel: int) -> None:
    torch.manual_seed(tokens)
    whole = UnpackedExperts(MOE, Ranks())
    w13, w2 = whole.w13.normal_(), whole.w2.normal_()
    latent, weights = torch.randn(tokens, MOE.latent_size), torch.rand(tokens, 3)
    ids = torch.stack([torch.randperm(MOE.num_experts)[:3] for _ in range(tokens)])
    total = torch.zeros(tokens, MOE.latent_size)
    for rank in range(size):
        ranks = Ranks(rank, size, expert_parallel_size=expert_parallel)
        part, inner = UnpackedExperts(MOE, ranks), ranks.within_expert
        for place, expert in enumerate(part.held):
            gate, up = w13[expert].chunk(2)
            part.w13[place] = torch.cat((inner.rows(gate), inner.rows(up)))
            part.w2[place] = inner.rows(w2[expert], dim=1)
        total += run_experts(latent, ids, weights, part, SITU)
    close(total, run_experts(latent, ids, weights, whole, SITU), 1e-5)


def test_experts_that_do_not_divide_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="896 experts cannot be dealt out over 3"):
        Ranks(0, 3, expert_parallel_size=3).experts(896)
    with pytest.raises(ValueError, match="4 tensor-parallel ranks cannot form 3"):
        _ = Ranks(0, 4, expert_parallel_size=3).within_expert


def test_experts_too_narrow_for_a_scale_group_cannot_stay_packed() -> None:
    with pytest.raises(ValueError, match="width 48 per rank cannot stay packed"):
        PackedExperts(replace(MOE, intermediate_size=96), Ranks(0, 2))


@pytest.mark.parametrize(
    ("asked", "stored_packed", "available_bytes", "chosen"),
    [
        ("auto", True, 400, "unpacked"),
        ("auto", True, 150, "packed"),
        ("auto", False, 150, "unpacked"),
        ("packed", True, 400, "packed"),
        ("unpacked", True, 10, "unpacked"),
    ],
)
def test_experts_are_unpacked_where_they_fit(
    asked: str, stored_packed: bool, available_bytes: int, chosen: str
) -> None:
    got = choose_format(asked, stored_packed=stored_packed, unpacked_bytes=100, available_bytes=available_bytes)
    assert got == chosen


@pytest.mark.parametrize(("asked", "message"), [("some", "allowed: auto, packed"), ("packed", "stores them unpacked")])
def test_an_impossible_expert_format_is_refused(asked: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_format(asked, stored_packed=False, unpacked_bytes=100, available_bytes=100)


@pytest.mark.parametrize("asked", ["auto", "fused"])
def test_on_a_gpu_experts_are_fused(asked: str) -> None:
    got = choose_format(asked, stored_packed=True, unpacked_bytes=100, available_bytes=1000, on_gpu=True)
    assert got == "fused"


@pytest.mark.parametrize(
    ("asked", "stored_packed", "on_gpu", "message"),
    [
        ("fused", True, False, "needs a GPU"),
        ("packed", True, True, "computes on a CPU only"),
        ("auto", False, True, "not MXFP4"),
    ],
)
def test_a_format_for_the_other_kind_of_device_is_refused(
    asked: str, stored_packed: bool, on_gpu: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose_format(asked, stored_packed=stored_packed, unpacked_bytes=1, available_bytes=9, on_gpu=on_gpu)


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
