"""Bytes of weights on each GPU, by part of the model: which tensors are split over ranks and which every rank holds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal

from k3_sglang.config import TextConfig
from k3_sglang.launch.planner.layout import NO_TRANSPORT, Layout, stages
from k3_sglang.loading.inventory import BYTE_DTYPES, expected_text_tensors, layer_and_expert

Part = Literal[
    "routed experts",
    "shared experts",
    "attention",
    "embedding and head",
    "latent projections",
    "router",
    "dense MLP",
    "norms and mixtures",
    "vision",
    "draft",
]
Split = Literal["whole", "tp", "attn_tp", "shared", "head"]
"""Over which ranks a tensor is split: none, all of a stage, those of an attention group, or by a rule of its own."""

_RULES: tuple[tuple[str, Part, Split], ...] = (
    (r"\.experts\.\d+\.", "routed experts", "tp"),
    (r"\.shared_experts\.", "shared experts", "shared"),
    (r"\.block_sparse_moe\.gate\.", "router", "whole"),
    (r"\.routed_expert_", "latent projections", "whole"),
    (r"\.mlp\.(gate|up|down)_proj\.", "dense MLP", "attn_tp"),
    (r"\.self_attn\.(q_a|kv_a|f_a)_", "attention", "whole"),
    (r"\.self_attn\.o_norm\.", "attention", "whole"),
    (r"\.self_attn\.", "attention", "attn_tp"),
    (r"\.embed_tokens\.", "embedding and head", "attn_tp"),
    (r"\.lm_head\.", "embedding and head", "head"),
    (r"", "norms and mixtures", "whole"),
)
"""Read in SGLang 0.5.23, ``srt/models/kimi_k3.py`` (what is ``ReplicatedLinear`` there); ours splits the same way."""

_F32_TENSORS = re.compile(r"\.(A_log|dt_bias|e_score_correction_bias)$")


@dataclass(frozen=True)
class Weight:
    """Tensors of one layer that belong to one part and are split the same way."""

    layer: int
    """0-based; -1 before the first layer, the number of layers behind the last."""
    part: Part
    split: Split
    bytes: int


@dataclass(frozen=True)
class Weights:
    """What one GPU of the heaviest stage holds."""

    parts: Mapping[Part, int]
    stage: int

    @property
    def bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


@lru_cache(maxsize=16)
def model_weights(text: TextConfig, dtype_bytes: int = 2) -> tuple[Weight, ...]:
    """All weights of the text model, experts as stored.

    All experts have the same tensors, so one stands for all: the release has half a million.

    Args:
        dtype_bytes: size of an unquantized value; the release is bfloat16.
    """
    one_expert = replace(text, moe=replace(text.moe, num_experts=1, experts_per_token=1))
    sizes: defaultdict[tuple[int, Part, Split], int] = defaultdict(int)
    for name, spec in expected_text_tensors(one_expert).items():
        part, split = _rule(name)
        layer, _ = layer_and_expert(name)
        place = layer if layer is not None else (-1 if "embed_tokens" in name else text.num_layers)
        value_bytes = 1 if spec.dtypes == BYTE_DTYPES else 4 if _F32_TENSORS.search(name) else dtype_bytes
        copies = text.moe.num_experts if part in ("routed experts", "router") else 1
        sizes[place, part, split] += prod(spec.shape) * value_bytes * copies
    return tuple(Weight(*key, size) for key, size in sizes.items())


def _rule(name: str) -> tuple[Part, Split]:
    for pattern, part, split in _RULES:
        if re.search(pattern, f".{name}"):
            return part, split
    raise AssertionError(f"no rule for {name}; the last one takes everything")


def checkpoint_bytes(text: TextConfig, vision_bytes: int = 0) -> int:
    """Bytes of all weight files (1.561 TB for the release, image tower included)."""
    return sum(weight.bytes for weight in model_weights(text)) + vision_bytes


def weights_per_gpu(
    text: TextConfig,
    layout: Layout,
    *,
    vision_bytes: int = 0,
    draft_bytes: int = 0,
    dtype_bytes: int = 2,
    dp_head: bool = False,
) -> Weights:
    """Weights of the GPU that holds most.

    Args:
        vision_bytes: of the image tower and projector; every rank of the first stage holds all of it.
        draft_bytes: of a draft model, which every rank is taken to hold whole.
        dp_head: with attention DP, whether the head is split over an attention group only (``--enable-dp-lm-head``).
    """
    heaviest: Weights | None = None
    for number, layers in enumerate(stages(text.num_layers, layout.pp)):
        parts: defaultdict[Part, int] = defaultdict(int)
        first, last = number == 0, number == layout.pp - 1
        for weight in model_weights(text, dtype_bytes):
            if weight.layer in layers or (first and weight.layer < 0) or (last and weight.layer == text.num_layers):
                parts[weight.part] += _share(weight, text, layout, dp_head=dp_head)
        if first and vision_bytes:
            parts["vision"] += vision_bytes
        if draft_bytes:
            parts["draft"] += draft_bytes
        held = Weights(dict(parts), number)
        if heaviest is None or held.bytes > heaviest.bytes:
            heaviest = held
    assert heaviest is not None
    return heaviest


def _share(weight: Weight, text: TextConfig, layout: Layout, *, dp_head: bool) -> int:
    """One rank's bytes of a weight of its stage."""
    ranks = {
        "whole": 1,
        "tp": layout.tp,
        "attn_tp": layout.attn_tp,
        # With an all-to-all transport each rank has tokens of its own, so it needs the shared experts whole.
        "shared": layout.tp if layout.transport == NO_TRANSPORT else layout.shared_tp,
        "head": layout.attn_tp if dp_head else layout.tp,
    }[weight.split]
    size = weight.bytes
    if weight.part == "routed experts" and layout.redundant_experts:
        size = size * (text.moe.num_experts + layout.redundant_experts) // text.moe.num_experts
    return -(-size // ranks)
