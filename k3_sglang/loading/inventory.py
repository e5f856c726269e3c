"""Every tensor a K3 checkpoint has to hold, as a function of config.json: names, shapes, dtypes. Standard library only.

The launcher compares file headers with it before anything is started, the loader fills its table from it, and an engine
compares a new checkpoint with it before it writes a single value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from k3_sglang.config import K3Config, TextConfig
from k3_sglang.vision.config import VisionConfig

TEXT_PREFIX = "language_model."
"""Prefix of every text tensor in the release."""

TOWER_PREFIX = "vision_tower."
PROJECTOR_PREFIX = "mm_projector."

MXFP4_GROUP_SIZE = 32
"""Values that share one scale byte in packed experts."""

FLOAT_DTYPES = ("BF16", "F32", "F16")
"""What unquantized tensors may be stored as (safetensors' names); they are cast when loaded."""

BYTE_DTYPES = ("U8",)
"""Packed MXFP4 weights and their scales."""

_PLACE = re.compile(r"(?:^|\.)model\.layers\.(\d+)\.(?:.*\.experts\.(\d+)\.)?")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor of a checkpoint has to be."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    """Allowed dtypes, by safetensors' names."""


Specs = dict[str, TensorSpec]


def expected_tensors(config: K3Config) -> Specs:
    """All tensors of a checkpoint: the text model's, and the image tower's when there is a ``vision_config``.

    The release has 497,220.

    Raises:
        ConfigError: ``vision_config`` describes a tower this implementation does not have.
    """
    specs = expected_text_tensors(config.text)
    if config.vision is not None:
        specs |= _vision(VisionConfig.from_dict(config.vision))
    return specs


def expected_text_tensors(text: TextConfig, prefix: str = TEXT_PREFIX) -> Specs:
    """Tensors of the text model; text-only checkpoints store them without the prefix."""
    hidden, vocab = text.hidden_size, text.vocab_size
    specs: Specs = {
        f"{prefix}model.embed_tokens.weight": TensorSpec((vocab, hidden)),
        f"{prefix}lm_head.weight": TensorSpec((vocab, hidden)),
        f"{prefix}model.norm.weight": TensorSpec((hidden,)),
        **_residual_score(f"{prefix}model.output_attn_res", hidden),
    }
    kinds = {"kda": _kda(text), "mla": _mla(text)}
    dense = _mlp("mlp.", hidden, text.dense_intermediate_size)
    moe = _moe(text)
    for layer, kind in enumerate(text.layer_kinds):
        name = f"{prefix}model.layers.{layer}."
        block = {f"{norm}.weight": TensorSpec((hidden,)) for norm in ("input_layernorm", "post_attention_layernorm")}
        block |= _residual_score("self_attention_res", hidden) | _residual_score("mlp_res", hidden)
        block |= kinds[kind] | (dense if text.is_dense(layer) else moe)
        specs.update((name + part, spec) for part, spec in block.items())
    return specs


def layer_and_expert(name: str) -> tuple[int | None, int | None]:
    """0-based layer of the text model, and expert in it, that a tensor belongs to; None where it belongs to none."""
    match = _PLACE.search(name)
    if match is None:
        return None, None
    layer, expert = match.groups()
    return int(layer), None if expert is None else int(expert)


def a_log_stored_len(num_heads: int, head_dim: int) -> int:
    """Length of ``A_log`` in a release file: one value per head, zero-padded to the head width (96 stored as 128)."""
    return max(num_heads, head_dim)


def _residual_score(name: str, hidden: int) -> Specs:
    return {f"{name}_norm.weight": TensorSpec((hidden,)), f"{name}_proj.weight": TensorSpec((1, hidden))}


def _kda(text: TextConfig) -> Specs:
    kda, hidden, wide = text.kda, text.hidden_size, text.kda.projection_size
    shapes: dict[str, tuple[int, ...]] = {f"{part}_proj.weight": (wide, hidden) for part in "qkvg"}
    shapes |= {f"{part}_conv1d.weight": (wide, 1, kda.conv_kernel_size) for part in "qkv"}
    shapes |= {
        "f_a_proj.weight": (kda.head_dim, hidden),
        "f_b_proj.weight": (wide, kda.head_dim),
        "b_proj.weight": (kda.num_heads, hidden),
        "A_log": (a_log_stored_len(kda.num_heads, kda.head_dim),),
        "dt_bias": (wide,),
        "o_norm.weight": (kda.head_dim,),
        "o_proj.weight": (hidden, wide),
    }
    return {f"self_attn.{name}": TensorSpec(shape) for name, shape in shapes.items()}


def _mla(text: TextConfig) -> Specs:
    mla, hidden = text.mla, text.hidden_size
    value_width = mla.num_heads * mla.v_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj.weight": (mla.q_lora_rank, hidden),
        "q_a_layernorm.weight": (mla.q_lora_rank,),
        "q_b_proj.weight": (mla.num_heads * mla.qk_head_dim, mla.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (mla.latent_dim, hidden),
        "kv_a_layernorm.weight": (mla.kv_lora_rank,),
        "kv_b_proj.weight": (mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "g_proj.weight": (value_width, hidden),
        "o_proj.weight": (hidden, value_width),
    }
    return {f"self_attn.{name}": TensorSpec(shape) for name, shape in shapes.items()}


def _mlp(name: str, hidden: int, width: int) -> Specs:
    return {
        f"{name}gate_proj.weight": TensorSpec((width, hidden)),
        f"{name}up_proj.weight": TensorSpec((width, hidden)),
        f"{name}down_proj.weight": TensorSpec((hidden, width)),
    }


def _moe(text: TextConfig) -> Specs:
    moe, hidden = text.moe, text.hidden_size
    block = "block_sparse_moe."
    specs: Specs = {
        f"{block}gate.weight": TensorSpec((moe.num_experts, hidden)),
        f"{block}gate.e_score_correction_bias": TensorSpec((moe.num_experts,)),
        f"{block}routed_expert_down_proj.weight": TensorSpec((moe.latent_size, hidden)),
        f"{block}routed_expert_norm.weight": TensorSpec((moe.latent_size,)),
        f"{block}routed_expert_up_proj.weight": TensorSpec((hidden, moe.latent_size)),
        **_mlp(f"{block}shared_experts.", hidden, moe.shared_intermediate_size),
    }
    inner, outer = (moe.intermediate_size, moe.latent_size), (moe.latent_size, moe.intermediate_size)
    matrices = {
        f"{part}.{name}": spec
        for part, (rows, columns) in (("w1", inner), ("w2", outer), ("w3", inner))
        for name, spec in _expert_matrix(rows, columns, packed=text.experts_packed).items()
    }
    for expert in range(moe.num_experts):
        specs.update((f"{block}experts.{expert}.{name}", spec) for name, spec in matrices.items())
    return specs


def _expert_matrix(rows: int, columns: int, *, packed: bool) -> Specs:
    if not packed:
        return {"weight": TensorSpec((rows, columns))}
    return {
        "weight_packed": TensorSpec((rows, columns // 2), BYTE_DTYPES),
        "weight_scale": TensorSpec((rows, columns // MXFP4_GROUP_SIZE), BYTE_DTYPES),
    }


def _vision(vision: VisionConfig) -> Specs:
    hidden, qkv, merged = vision.hidden_size, vision.qkv_size, vision.merged_size
    shapes: dict[str, tuple[int, ...]] = {
        f"{TOWER_PREFIX}patch_embed.proj.weight": (hidden, 3, vision.patch_size, vision.patch_size),
        f"{TOWER_PREFIX}patch_embed.pos_emb.weight": (vision.pos_emb_height, vision.pos_emb_width, hidden),
        f"{TOWER_PREFIX}encoder.final_layernorm.weight": (hidden,),
        f"{PROJECTOR_PREFIX}proj.0.weight": (merged, merged),
        f"{PROJECTOR_PREFIX}proj.2.weight": (vision.text_hidden_size, merged),
        f"{PROJECTOR_PREFIX}post_norm.weight": (vision.text_hidden_size,),
    }
    for index in range(vision.num_layers):
        name = f"{TOWER_PREFIX}encoder.blocks.{index}."
        shapes |= {
            f"{name}norm0.weight": (hidden,),
            f"{name}wqkv.weight": (3 * qkv, hidden),
            f"{name}wo.weight": (hidden, qkv),
            f"{name}norm1.weight": (hidden,),
            f"{name}mlp.fc0.weight": (vision.intermediate_size, hidden),
            f"{name}mlp.fc1.weight": (hidden, vision.intermediate_size),
        }
    return {name: TensorSpec(shape) for name, shape in shapes.items()}
