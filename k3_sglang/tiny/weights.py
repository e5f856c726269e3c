"""Random numbers of the tiny K3: every tensor of the release's inventory, the same bytes on every machine.

Each tensor's randomness is SHAKE-256 of seed and name, turned into numbers by exact integer arithmetic, so neither
torch's generators nor a CPU's vector instructions change a bit. The scales make small mistakes visible: decays spread
over half lives of one to several hundred tokens, attention far from uniform, logits a few units apart.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from k3_sglang.config import K3Config
from k3_sglang.kernels.mxfp4 import encode
from k3_sglang.tiny.recipe import CONFIG, VOCAB_SIZE, special_id
from k3_sglang.tiny.vocabulary import BASE_TOKENS
from k3_sglang.vision.config import VisionConfig

PREFIX = "language_model."
"""Prefix of every text tensor in the release."""

_WRITABLE_SPECIALS = {special_id(f"<|{name}|>") for name in ("end_of_msg", "open", "close", "sep")}
"""Control tokens a turn consists of. All others get logit 0, far below the best, as if trained never to be written."""

A_LOG_PADDING = 32
"""The release pads ``A_log`` with zeros; readers take the first ``num_heads`` values."""


class _Source:
    """Named random numbers for one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def _words(self, name: str, count: int) -> Tensor:
        data = hashlib.shake_256(f"{self.seed}/{name}".encode()).digest(2 * count)
        return torch.frombuffer(bytearray(data), dtype=torch.uint16).to(torch.int32)

    def normal(self, name: str, shape: tuple[int, ...], std: float) -> Tensor:
        """Nearly normal numbers: the sum of four uniform 16-bit integers, centred and scaled."""
        total = self._words(name, 4 * math.prod(shape)).view(-1, 4).sum(-1)
        unit = math.sqrt(3.0) / 65536  # four uniforms of width 65536 have variance 65536^2 / 3
        return ((total.double() - 2 * 65535) * (std * unit)).float().view(shape)

    def uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> Tensor:
        """Uniform numbers in [low, high)."""
        return (self._words(name, math.prod(shape)).double() * ((high - low) / 65536) + low).float().view(shape)


def tensors(seed: int) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the checkpoint as (name, tensor): embedding, layers in order, head, image tower."""
    source = _Source(seed)
    text = K3Config.from_dict(CONFIG).text
    model, hidden = f"{PREFIX}model.", text.hidden_size
    yield from _linear(source, f"{model}embed_tokens", text.vocab_size, hidden, std=1.0)
    for layer in range(text.num_layers):
        name = f"{model}layers.{layer}."
        yield from _norm(source, f"{name}input_layernorm", hidden)
        yield from _norm(source, f"{name}post_attention_layernorm", hidden)
        yield from _residual_score(source, f"{name}self_attention_res", hidden)
        yield from _residual_score(source, f"{name}mlp_res", hidden)
        yield from (_kda if text.layer_kinds[layer] == "kda" else _mla)(source, f"{name}self_attn.")
        if text.is_dense(layer):
            yield from _mlp(source, f"{name}mlp.", hidden, text.dense_intermediate_size)
        else:
            yield from _moe(source, f"{name}block_sparse_moe.")
    yield from _norm(source, f"{model}norm", hidden)
    yield from _residual_score(source, f"{model}output_attn_res", hidden)
    for name, head in _linear(source, f"{PREFIX}lm_head", text.vocab_size, hidden, std=2.0 / math.sqrt(hidden)):
        head[[token for token in range(BASE_TOKENS, VOCAB_SIZE) if token not in _WRITABLE_SPECIALS]] = 0
        yield name, head
    yield from _image_tower(source)


_Tensors = Iterator[tuple[str, Tensor]]


def _linear(source: _Source, name: str, rows: int, columns: int, *, gain: float = 1.0, std: float = 0.0) -> _Tensors:
    """A bf16 matrix; by default an input of unit size gives an output of size ``gain``."""
    full = f"{name}.weight"
    yield full, source.normal(full, (rows, columns), std or gain / math.sqrt(columns)).bfloat16()


def _norm(source: _Source, name: str, width: int) -> _Tensors:
    full = f"{name}.weight"
    yield full, source.uniform(full, (width,), 0.7, 1.3).bfloat16()


def _residual_score(source: _Source, name: str, width: int) -> _Tensors:
    yield from _norm(source, f"{name}_norm", width)
    yield from _linear(source, f"{name}_proj", 1, width, gain=1.5)


def _kda(source: _Source, name: str) -> _Tensors:
    text = K3Config.from_dict(CONFIG).text
    kda, hidden, wide = text.kda, text.hidden_size, text.kda.projection_size
    for part in "qkv":
        yield from _linear(source, f"{name}{part}_proj", wide, hidden, gain=1.5)
        taps = f"{name}{part}_conv1d.weight"
        yield taps, source.normal(taps, (wide, 1, kda.conv_kernel_size), 0.6).bfloat16()
    yield from _linear(source, f"{name}f_a_proj", kda.head_dim, hidden)
    yield from _linear(source, f"{name}f_b_proj", wide, kda.head_dim, gain=0.7)
    yield from _linear(source, f"{name}b_proj", kda.num_heads, hidden, gain=1.5)
    rates = [0.6 + 0.8 * head / max(1, kda.num_heads - 1) for head in range(kda.num_heads)]
    a_log = torch.zeros(max(A_LOG_PADDING, kda.num_heads))
    a_log[: kda.num_heads] = torch.tensor([math.log(rate) for rate in rates])
    yield f"{name}A_log", a_log
    # sigmoid(-8) * 5 decays by 0.2 % per token, sigmoid(-2) * 5 by 45 %.
    centres = source.uniform(f"{name}dt_bias", (kda.num_heads, kda.head_dim), -8.0, -2.0)
    yield f"{name}dt_bias", (centres / torch.tensor(rates).unsqueeze(1)).flatten()
    yield from _linear(source, f"{name}g_proj", wide, hidden)
    yield from _norm(source, f"{name}o_norm", kda.head_dim)
    yield from _linear(source, f"{name}o_proj", hidden, wide, gain=2.0)


def _mla(source: _Source, name: str) -> _Tensors:
    text = K3Config.from_dict(CONFIG).text
    mla, hidden = text.mla, text.hidden_size
    yield from _linear(source, f"{name}q_a_proj", mla.q_lora_rank, hidden)
    yield from _norm(source, f"{name}q_a_layernorm", mla.q_lora_rank)
    yield from _linear(source, f"{name}q_b_proj", mla.num_heads * mla.qk_head_dim, mla.q_lora_rank, gain=2.0)
    yield from _linear(source, f"{name}kv_a_proj_with_mqa", mla.latent_dim, hidden)
    yield from _norm(source, f"{name}kv_a_layernorm", mla.kv_lora_rank)
    expanded = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield from _linear(source, f"{name}kv_b_proj", expanded, mla.kv_lora_rank, gain=1.5)
    wide = mla.num_heads * mla.v_head_dim
    yield from _linear(source, f"{name}g_proj", wide, hidden)
    yield from _linear(source, f"{name}o_proj", hidden, wide, gain=2.0)


def _mlp(source: _Source, name: str, hidden: int, inner: int) -> _Tensors:
    yield from _linear(source, f"{name}gate_proj", inner, hidden, gain=1.5)
    yield from _linear(source, f"{name}up_proj", inner, hidden, gain=1.5)
    yield from _linear(source, f"{name}down_proj", hidden, inner)


def _moe(source: _Source, name: str) -> _Tensors:
    text = K3Config.from_dict(CONFIG).text
    moe, hidden = text.moe, text.hidden_size
    yield from _linear(source, f"{name}gate", moe.num_experts, hidden, gain=1.5)
    bias = f"{name}gate.e_score_correction_bias"
    yield bias, source.normal(bias, (moe.num_experts,), 0.05)
    yield from _linear(source, f"{name}routed_expert_down_proj", moe.latent_size, hidden)
    yield from _norm(source, f"{name}routed_expert_norm", moe.latent_size)
    yield from _linear(source, f"{name}routed_expert_up_proj", hidden, moe.latent_size)
    yield from _mlp(source, f"{name}shared_experts.", hidden, moe.shared_intermediate_size)
    shapes = {
        "w1": (moe.intermediate_size, moe.latent_size),
        "w2": (moe.latent_size, moe.intermediate_size),
        "w3": (moe.intermediate_size, moe.latent_size),
    }
    for expert in range(moe.num_experts):
        for part, (rows, columns) in shapes.items():
            full = f"{name}experts.{expert}.{part}"
            packed, scale = encode(source.normal(full, (rows, columns), 1.5 / math.sqrt(columns)))
            yield f"{full}.weight_packed", packed
            yield f"{full}.weight_scale", scale


def _image_tower(source: _Source) -> _Tensors:
    """Tower and projector; features come out as large as embeddings, so that pictures matter as much as words."""
    vision = VisionConfig.from_dict(CONFIG["vision_config"])
    hidden, side = vision.hidden_size, vision.patch_size
    patch = "vision_tower.patch_embed.proj.weight"
    yield patch, source.normal(patch, (hidden, 3, side, side), 1.5 / math.sqrt(3 * side * side)).bfloat16()
    positions = "vision_tower.patch_embed.pos_emb.weight"
    shape = (vision.pos_emb_height, vision.pos_emb_width, hidden)
    yield positions, source.normal(positions, shape, 0.5).bfloat16()
    for layer in range(vision.num_layers):
        block = f"vision_tower.encoder.blocks.{layer}."
        yield from _norm(source, f"{block}norm0", hidden)
        yield from _linear(source, f"{block}wqkv", 3 * vision.qkv_size, hidden, gain=1.5)
        yield from _linear(source, f"{block}wo", hidden, vision.qkv_size)
        yield from _norm(source, f"{block}norm1", hidden)
        yield from _linear(source, f"{block}mlp.fc0", vision.intermediate_size, hidden, gain=1.5)
        yield from _linear(source, f"{block}mlp.fc1", hidden, vision.intermediate_size)
    yield from _norm(source, "vision_tower.encoder.final_layernorm", hidden)
    yield from _linear(source, "mm_projector.proj.0", vision.merged_size, vision.merged_size)
    yield from _linear(source, "mm_projector.proj.2", vision.text_hidden_size, vision.merged_size)
    yield from _norm(source, "mm_projector.post_norm", vision.text_hidden_size)
