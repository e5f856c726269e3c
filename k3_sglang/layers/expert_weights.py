"""How routed experts' weights are kept: ready to multiply, or packed as stored and unpacked at every use."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from k3_sglang.config import MoEConfig
from k3_sglang.kernels.mxfp4 import GROUP_SIZE, unpack
from k3_sglang.layers.parallel import Ranks, weight

ExpertFormat = Literal["packed", "unpacked", "fused"]
"""On a CPU, ``packed`` holds 17 bits for 4 bytes of fp32, and ``unpacked`` decodes several times faster. On a GPU
``fused``: packed, in the layout of SGLang's MoE kernels (:mod:`k3_sglang.layers.fused_experts`)."""

PackedMatrix = tuple[torch.Tensor, torch.Tensor]
"""Codes [out, in / 2] and scales [out, in / 32], uint8: views into a layer's parameters."""

UNPACKED_MEMORY_SHARE = 0.5
"""Unpacked experts may take this share of the memory that is available before loading."""


def choose_format(
    asked: str, *, stored_packed: bool, unpacked_bytes: int, available_bytes: int, on_gpu: bool = False
) -> ExpertFormat:
    """Decide how this process keeps its experts.

    Args:
        asked: ``auto``, ``packed``, ``unpacked`` or ``fused``; auto is fused on a GPU, else unpacks when that fits
            comfortably.
        stored_packed: whether the checkpoint has MXFP4 experts at all.
        unpacked_bytes: size of this rank's experts in the model dtype.
        available_bytes: memory available before loading.
        on_gpu: whether the model is built on a GPU.

    Raises:
        ValueError: an unknown value, one for the other kind of device, or packed experts of a checkpoint without any.
    """
    if asked not in ("auto", "packed", "unpacked", "fused"):
        raise ValueError(f"experts is {asked!r}; allowed: auto, packed, unpacked, fused")
    if on_gpu:
        return _fused_or_error(asked, stored_packed)
    if asked == "fused":
        raise ValueError("experts is 'fused', which needs a GPU; on a CPU use auto, packed or unpacked")
    if asked == "packed" and not stored_packed:
        raise ValueError("experts cannot be kept packed: this checkpoint stores them unpacked; use auto or unpacked")
    if asked == "auto":
        fits = unpacked_bytes <= UNPACKED_MEMORY_SHARE * available_bytes
        return "unpacked" if fits or not stored_packed else "packed"
    return "packed" if asked == "packed" else "unpacked"


def _fused_or_error(asked: str, stored_packed: bool) -> ExpertFormat:
    if asked in ("packed", "unpacked"):
        raise ValueError(f"experts is {asked!r}, which computes on a CPU only; on a GPU use auto or fused")
    if not stored_packed:
        raise ValueError(
            "this checkpoint's experts are not MXFP4, and on a GPU this K3 model class runs no others; "
            "use --model-impl sglang, or a CPU"
        )
    return "fused"


class ExpertWeights(Protocol):
    """Weights of the routed experts of a layer that this rank holds (its part of each); experts go by their index."""

    held: range
    total: int
    """Experts of the layer on all ranks together."""

    def one(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """w1|w3 [2 * I, L] and w2 [L, I] of one expert."""
        ...

    def all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """w1|w3 [E, 2 * I, L] and w2 [E, L, I] of every expert held."""
        ...


class UnpackedExperts(torch.nn.Module):
    """Weights in the model dtype: 2 or 4 bytes a value."""

    def __init__(self, moe: MoEConfig, ranks: Ranks) -> None:
        super().__init__()
        self.held, self.total = ranks.experts(moe.num_experts), moe.num_experts
        width = ranks.within_expert.share(moe.intermediate_size, "moe_intermediate_size")
        self.w13 = weight(len(self.held), 2 * width, moe.latent_size)
        self.w2 = weight(len(self.held), moe.latent_size, width)

    def one(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one expert's weights."""
        place = expert - self.held.start
        return self.w13[place], self.w2[place]

    def all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights themselves."""
        return self.w13, self.w2


class PackedExperts(torch.nn.Module):
    """MXFP4 codes and scales as the release stores them: 17/32 of a byte a value."""

    def __init__(self, moe: MoEConfig, ranks: Ranks) -> None:
        super().__init__()
        width = ranks.within_expert.share(moe.intermediate_size, "moe_intermediate_size")
        if width % GROUP_SIZE:
            raise ValueError(
                f"experts of width {width} per rank cannot stay packed: MXFP4 shares a scale over {GROUP_SIZE} values; "
                "use fewer tensor-parallel ranks or unpacked experts"
            )
        self.held, self.total = ranks.experts(moe.num_experts), moe.num_experts
        experts, latent = len(self.held), moe.latent_size
        self.dtype = torch.get_default_dtype()
        self.w13_codes = weight(experts, 2 * width, latent // 2, dtype=torch.uint8)
        self.w13_scales = weight(experts, 2 * width, latent // GROUP_SIZE, dtype=torch.uint8)
        self.w2_codes = weight(experts, latent, width // 2, dtype=torch.uint8)
        self.w2_scales = weight(experts, latent, width // GROUP_SIZE, dtype=torch.uint8)

    def packed(self, expert: int) -> tuple[PackedMatrix, PackedMatrix, PackedMatrix]:
        """Where w1, w3 and w2 of an expert held here are loaded to."""
        place = expert - self.held.start
        w1, w3 = self.w13_codes[place].chunk(2)
        w1_scales, w3_scales = self.w13_scales[place].chunk(2)
        return (w1, w1_scales), (w3, w3_scales), (self.w2_codes[place], self.w2_scales[place])

    def one(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One expert's weights, unpacked now."""
        place = expert - self.held.start
        return (
            unpack(self.w13_codes[place], self.w13_scales[place], self.dtype),
            unpack(self.w2_codes[place], self.w2_scales[place], self.dtype),
        )

    def all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of every expert held, unpacked now."""
        return unpack(self.w13_codes, self.w13_scales, self.dtype), unpack(self.w2_codes, self.w2_scales, self.dtype)
