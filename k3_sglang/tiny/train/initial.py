"""Where training starts: scales that learn well, decays from a few tokens to a thousand, even mixtures."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from k3_sglang.config import TextConfig
from k3_sglang.reference.checkpoint import expected_tensors

EMBEDDING_STD: Final = 0.7
MATRIX_GAIN: Final = 0.7
OUTPUT_GAIN: Final = 0.3
"""Gain of the matrices that write into the stream."""

DECAY_LOGITS: Final = (-8.5, -2.5)
"""Range of ``dt_bias``: half lives of about 700 tokens down to 2."""

_OUTPUTS = ("o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight", "f_b_proj.weight")


def initial_parameters(text: TextConfig, seed: int) -> dict[str, Tensor]:
    """Parameters by the release's names, experts stacked [E, out, in]; one seed always gives the same values.

    The router's correction bias is among them although no gradient moves it.
    """
    generator = torch.Generator().manual_seed(seed)
    return {name: _initial(name, shape, generator) for name, shape in parameter_shapes(text).items()}


def parameter_shapes(text: TextConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the checkpoint's order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in expected_tensors(text).items():
        if ".experts." not in name:
            shapes[name] = shape
            continue
        block, _, rest = name.partition(".experts.")
        part = rest.split(".")[1]
        inner = (text.moe.intermediate_size, text.moe.latent_size)
        shapes[f"{block}.experts.{part}"] = (text.moe.num_experts, *(inner[::-1] if part == "w2" else inner))
    return shapes


def _initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith(("norm.weight", "layernorm.weight")):
        return torch.ones(shape)
    if name.endswith(("res_proj.weight", "A_log", "e_score_correction_bias")):
        return torch.zeros(shape)
    if name.endswith("dt_bias"):
        low, high = DECAY_LOGITS
        return torch.rand(shape, generator=generator) * (high - low) + low
    noise = torch.randn(shape, generator=generator)
    if name.endswith("embed_tokens.weight"):
        return noise * EMBEDDING_STD
    if name.endswith("lm_head.weight"):
        return noise * 0.02
    if name.endswith("conv1d.weight"):
        taps = noise * 0.3
        taps[..., -1] += 0.7  # mostly the current token
        return taps
    gain = OUTPUT_GAIN if name.endswith(_OUTPUTS) or name.endswith(".w2") else MATRIX_GAIN
    return noise * (gain / math.sqrt(shape[-1]))
