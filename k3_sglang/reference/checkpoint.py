"""Read a release-layout checkpoint totally: every tensor the text model needs, no unknown one, shapes checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from k3_sglang.config import K3Config, TextConfig
from k3_sglang.kernels.mxfp4 import GROUP_SIZE
from k3_sglang.kernels.mxfp4 import decode as decode_mxfp4

PREFIX = "language_model."
"""Prefix of every text tensor in the release."""

VISION_PREFIXES = ("vision_tower.", "mm_projector.")
"""Image tower and projector: present exactly when config.json has a ``vision_config``; no part of the text model."""

INDEX_FILE = "model.safetensors.index.json"

_FLOAT32_NAMES = ("A_log", "dt_bias", "e_score_correction_bias")
"""Parameters that stay float32 in a bf16 model."""

Shape = tuple[int, ...]


class ReferenceCheckpointError(ValueError):
    """The files are not exactly the tensors that config.json describes; the message lists names and shapes."""


def load_weights(directory: str | Path, config: K3Config, dtype: torch.dtype) -> dict[str, Tensor]:
    """Text tensors by name without prefix, in ``dtype`` (A_log, dt_bias and the router bias in float32).

    Packed experts are decoded and stacked: ``....experts.w1`` [experts, out, in], likewise w2 and w3.

    Raises:
        ReferenceCheckpointError: a tensor is missing, unknown, twice there, or has a wrong shape or dtype.
    """
    expected = expected_tensors(config.text)
    found: dict[str, Tensor] = {}
    for name, tensor in _read(Path(directory)):
        if name.startswith(VISION_PREFIXES) and config.vision is not None:
            continue
        short = name.removeprefix(PREFIX)
        if not name.startswith(PREFIX) or short not in expected:
            raise ReferenceCheckpointError(f"{directory}: unknown tensor {name!r} {tuple(tensor.shape)}")
        _check(name, tensor, expected[short])
        found[short] = tensor
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise ReferenceCheckpointError(
            f"{directory}: {len(missing)} of {len(expected)} tensors are missing, first {PREFIX}{missing[0]!r} "
            f"{expected[missing[0]]}"
        )
    stacked = _stack_experts(found, config.text)
    return {
        name: tensor.float() if name.endswith(_FLOAT32_NAMES) else tensor.to(dtype)
        for name, tensor in (found | stacked).items()
    }


def expected_tensors(text: TextConfig) -> dict[str, Shape]:
    """Name (without prefix) and shape of every text tensor; ``A_log`` may be longer than stated."""
    hidden, vocab = text.hidden_size, text.vocab_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "model.output_attn_res_norm.weight": (hidden,),
        "model.output_attn_res_proj.weight": (1, hidden),
    }
    for index, kind in enumerate(text.layer_kinds):
        block: dict[str, Shape] = {
            f"{norm}.weight": (hidden,)
            for norm in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm")
        }
        block |= {f"{part}_res_proj.weight": (1, hidden) for part in ("self_attention", "mlp")}
        attention = _kda_shapes(text) if kind == "kda" else _mla_shapes(text)
        block |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        if text.is_dense(index):
            block |= _mlp_shapes("mlp.", hidden, text.dense_intermediate_size)
        else:
            block |= {f"block_sparse_moe.{name}": shape for name, shape in _moe_shapes(text).items()}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in block.items()}
    return shapes


def _kda_shapes(text: TextConfig) -> dict[str, Shape]:
    kda, hidden, wide = text.kda, text.hidden_size, text.kda.projection_size
    shapes: dict[str, Shape] = {f"{part}_proj.weight": (wide, hidden) for part in "qkvg"}
    shapes |= {f"{part}_conv1d.weight": (wide, 1, kda.conv_kernel_size) for part in "qkv"}
    return shapes | {
        "o_proj.weight": (hidden, wide),
        "f_a_proj.weight": (kda.head_dim, hidden),
        "f_b_proj.weight": (wide, kda.head_dim),
        "b_proj.weight": (kda.num_heads, hidden),
        "A_log": (kda.num_heads,),
        "dt_bias": (wide,),
        "o_norm.weight": (kda.head_dim,),
    }


def _mla_shapes(text: TextConfig) -> dict[str, Shape]:
    mla, hidden = text.mla, text.hidden_size
    return {
        "q_a_proj.weight": (mla.q_lora_rank, hidden),
        "q_a_layernorm.weight": (mla.q_lora_rank,),
        "q_b_proj.weight": (mla.num_heads * mla.qk_head_dim, mla.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (mla.latent_dim, hidden),
        "kv_a_layernorm.weight": (mla.kv_lora_rank,),
        "kv_b_proj.weight": (mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "g_proj.weight": (mla.num_heads * mla.v_head_dim, hidden),
        "o_proj.weight": (hidden, mla.num_heads * mla.v_head_dim),
    }


def _mlp_shapes(name: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{name}gate_proj.weight": (inner, hidden),
        f"{name}up_proj.weight": (inner, hidden),
        f"{name}down_proj.weight": (hidden, inner),
    }


def _moe_shapes(text: TextConfig) -> dict[str, Shape]:
    moe, hidden = text.moe, text.hidden_size
    shapes: dict[str, Shape] = {
        "gate.weight": (moe.num_experts, hidden),
        "gate.e_score_correction_bias": (moe.num_experts,),
        "routed_expert_down_proj.weight": (moe.latent_size, hidden),
        "routed_expert_up_proj.weight": (hidden, moe.latent_size),
        "routed_expert_norm.weight": (moe.latent_size,),
        **_mlp_shapes("shared_experts.", hidden, moe.shared_intermediate_size),
    }
    inner = (moe.intermediate_size, moe.latent_size)
    for part, (rows, columns) in {"w1": inner, "w2": inner[::-1], "w3": inner}.items():
        for expert in range(moe.num_experts):
            name = f"experts.{expert}.{part}"
            if text.experts_packed:
                shapes[f"{name}.weight_packed"] = (rows, columns // 2)
                shapes[f"{name}.weight_scale"] = (rows, columns // GROUP_SIZE)
            else:
                shapes[f"{name}.weight"] = (rows, columns)
    return shapes


def _read(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the shards that the index names; index and shards must list the same."""
    index = directory / INDEX_FILE
    if not index.is_file():
        raise ReferenceCheckpointError(f"{index} does not exist; a checkpoint directory lists its shards there")
    weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    for file in sorted(set(weight_map.values())):
        with safe_open(directory / file, framework="pt") as shard:
            names = set(shard.keys())
            listed = {name for name, place in weight_map.items() if place == file}
            if names != listed:
                raise ReferenceCheckpointError(
                    f"{directory}: {file} and {INDEX_FILE} disagree about {sorted(names ^ listed)[:3]}"
                )
            for name in sorted(names):
                yield name, shard.get_tensor(name)


def _check(name: str, tensor: Tensor, shape: Shape) -> None:
    actual = tuple(tensor.shape)
    padded = name.endswith(".A_log") and len(actual) == 1 and actual[0] > shape[0]
    if padded and bool(tensor[shape[0] :].any()):
        raise ReferenceCheckpointError(f"{name!r} has values beyond its {shape[0]} heads where padding must be zero")
    if actual != shape and not padded:
        raise ReferenceCheckpointError(f"{name!r} has shape {actual}; config.json requires {shape}")
    if (tensor.dtype == torch.uint8) != name.endswith((".weight_packed", ".weight_scale")):
        raise ReferenceCheckpointError(
            f"{name!r} has dtype {tensor.dtype}; only packed experts are uint8, and they must"
        )


def _stack_experts(found: dict[str, Tensor], text: TextConfig) -> dict[str, Tensor]:
    """Take the experts' tensors out of ``found``; returns them decoded and stacked."""
    stacked: dict[str, Tensor] = {}
    for layer in range(text.num_layers):
        if text.is_dense(layer):
            continue
        block = f"model.layers.{layer}.block_sparse_moe.experts."
        for part in ("w1", "w2", "w3"):
            names = [f"{block}{expert}.{part}" for expert in range(text.moe.num_experts)]
            if text.experts_packed:
                packed = torch.stack([found.pop(f"{name}.weight_packed") for name in names])
                scale = torch.stack([found.pop(f"{name}.weight_scale") for name in names])
                stacked[f"{block}{part}"] = decode_mxfp4(packed, scale)
            else:
                stacked[f"{block}{part}"] = torch.stack([found.pop(f"{name}.weight") for name in names])
    return stacked
