"""Part of gpu_contracts.py: routed experts through SGLang's FusedMoE, against its loader and our CPU experts."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import situ_and_mul
from sglang.srt.layers.quantization import mxfp4

from k3_sglang.config import MoEConfig, SituConfig
from k3_sglang.kernels.mxfp4 import encode, unpack
from k3_sglang.layers.expert_weights import PackedExperts
from k3_sglang.layers.experts import run_experts
from k3_sglang.layers.fused_experts import FusedExperts
from k3_sglang.layers.parallel import Ranks
from k3_sglang.layers.situ import situ_glu
from tests.model.gpu_contracts_machine import AMPERE, BLACKWELL, HOPPER, engine, raises

MOE = MoEConfig(
    num_experts=8,
    experts_per_token=3,
    num_shared_experts=1,
    intermediate_size=128,
    latent_size=256,
    renormalize=True,
    routed_scaling_factor=1.0,
)
SITU = SituConfig(beta=4.0, linear_beta=25.0)


def stored_experts(moe: MoEConfig) -> dict[int, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Codes and scales of w1, w3 and w2 of every expert, as a checkpoint has them."""
    torch.manual_seed(0)
    width, latent = moe.intermediate_size, moe.latent_size
    shapes = ((width, latent), (width, latent), (latent, width))
    return {e: [encode(torch.randn(shape) * 0.05) for shape in shapes] for e in range(moe.num_experts)}


def fill(experts: FusedExperts | PackedExperts, moe: MoEConfig, ranks: Ranks) -> None:
    """Load this rank's part of every expert it holds, as the loading table does."""
    for expert, stored in stored_experts(moe).items():
        if expert in experts.held:
            for place, pair, dim in zip(experts.packed(expert), stored, (0, 0, 1), strict=True):
                for parameter, tensor in zip(place, pair, strict=True):
                    parameter.copy_(ranks.within_expert.rows(tensor, dim))


def fill_upstream(layer: Any, moe: MoEConfig) -> None:
    """Hand every tensor to SGLang's own weight loader."""
    for expert, stored in stored_experts(moe).items():
        for (matrix, shard), pair in zip((("w13", "w1"), ("w13", "w3"), ("w2", "w2")), stored, strict=True):
            for suffix, tensor in zip(("weight", "weight_scale"), pair, strict=True):
                name = f"{matrix}_{suffix}"
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor, name, shard_id=shard, expert_id=expert)


def loads_like_upstream(place: tuple[int, int, int]) -> bool:
    """Whether our loading fills SGLang's parameters exactly as its own weight loader does."""
    ranks = Ranks(place[0], place[1], expert_parallel_size=place[2])
    with engine(HOPPER, place):
        ours, theirs = (FusedExperts(MOE, SITU, 1, ranks) for _ in range(2))
        fill(ours, MOE, ranks)
        fill_upstream(theirs.fused, MOE)
        pairs = [(values(ours.fused, matrix), values(theirs.fused, matrix)) for matrix in ("w13", "w2")]
        return all(bool(mine.any()) and torch.equal(mine, upstreams) for mine, upstreams in pairs)


def values(layer: Any, matrix: str) -> torch.Tensor:
    """Weights that a layer's codes and scales stand for; scales of padding may differ, their codes are zero."""
    codes, scales = getattr(layer, f"{matrix}_weight"), getattr(layer, f"{matrix}_weight_scale")
    return unpack(codes.data, scales.data, torch.bfloat16)


def native_difference(latent_size: int) -> float:
    """Largest difference of SGLang's layer, on its plain PyTorch path, from our CPU experts, over the largest value.

    The same packed weights, the same routing. Shows that w1, w3 and SiTU's constants arrive where SGLang reads them.
    """
    moe = MoEConfig(**{**MOE.__dict__, "latent_size": latent_size})
    with engine(HOPPER):
        fused, packed = FusedExperts(moe, SITU, 1, Ranks()), PackedExperts(moe, Ranks())
        fill(fused, moe, Ranks())
        fill(packed, moe, Ranks())
        layer = fused.fused
        for matrix in ("w13", "w2"):
            rows, columns = (None, latent_size) if matrix == "w13" else (latent_size, None)
            unpacked = values(layer, matrix)[:, :rows, :columns]
            setattr(layer, f"{matrix}_weight", torch.nn.Parameter(unpacked, requires_grad=False))
        layer.w2_weight_bias.data = layer.w2_weight_bias.data[:, :latent_size]
        mxfp4._is_cpu = True  # the method's own path for machines without a GPU, over unpacked weights
        torch.manual_seed(2)
        latent = torch.randn(7, latent_size, dtype=torch.bfloat16)
        ids = torch.stack([torch.randperm(moe.num_experts)[: moe.experts_per_token] for _ in range(7)])
        weights = torch.rand(7, moe.experts_per_token, dtype=torch.float32)
        got = fused(latent, ids, weights).float()
        wanted = run_experts(latent, ids, weights, packed, SITU)
        mxfp4._is_cpu = False
        return float((got - wanted).abs().max() / wanted.abs().max())


def reload_keeps_the_layout() -> dict[str, bool]:
    """What happens to the parameters over load, rewrite, rewrite again, restore, load."""
    with engine(HOPPER):
        fused = FusedExperts(MOE, SITU, 1, Ranks())
        method = fused.fused.quant_method
        rewrites = []
        original = mxfp4.Mxfp4MoEMethod.process_weights_after_loading

        def rewrite(self: Any, layer: Any) -> None:  # the kernels' own needs a GPU
            rewrites.append(layer)
            layer.w13_weight = torch.nn.Parameter(layer.w13_weight.data.flatten(), requires_grad=False)

        mxfp4.Mxfp4MoEMethod.process_weights_after_loading = rewrite
        fill(fused, MOE, Ranks())
        before = {name: parameter.clone() for name, parameter in fused.named_parameters()}
        method.process_weights_after_loading(fused.fused)
        method.process_weights_after_loading(fused.fused)
        refused = raises(lambda: fused.packed(0)).startswith("RuntimeError")
        method.restore_weights_before_loading(fused.fused)
        method.restore_weights_before_loading(fused.fused)
        fill(fused, MOE, Ranks())
        mxfp4.Mxfp4MoEMethod.process_weights_after_loading = original
        after = dict(fused.named_parameters())
        return {
            "rewritten once": len(rewrites) == 1,
            "loading into kernel layout refused": refused,
            "same after reload": before.keys() == after.keys()
            and all(torch.equal(before[name], after[name]) for name in before),
        }


def methods() -> dict[str, str]:
    """Runner that a layer really gets, or the refusal, per machine and setting."""
    found = {}
    for name, machine, runner in (
        ("hopper auto", HOPPER, "auto"),
        ("hopper flashinfer_mxfp4", HOPPER, "flashinfer_mxfp4"),
        ("blackwell auto", BLACKWELL, "auto"),
        ("blackwell triton_kernel", BLACKWELL, "triton_kernel"),
        ("ampere auto", AMPERE, "auto"),
    ):
        with engine(machine, moe_runner_backend=runner):
            made: list[FusedExperts] = []
            error = raises(lambda made=made: made.append(FusedExperts(MOE, SITU, 1, Ranks())))
            found[name] = str(made[0].fused.runner_backend.value) if made else error
    return found


def situ_kernel_difference() -> float:
    """Marlin's Triton activation, under the interpreter, against ours."""
    torch.manual_seed(3)
    gate_up = torch.randn(5, 2 * 96, dtype=torch.float32) * 20
    out = torch.empty(5, 96, dtype=torch.float32)
    situ_and_mul(out, gate_up, situ_beta=SITU.beta, linear_beta=SITU.linear_beta)
    return float((out - situ_glu(gate_up, SITU)).abs().max())
