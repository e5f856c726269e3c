"""The trainable K3 text model: batches of whole sequences, parameters under the release's names.

Equal to :class:`k3_sglang.reference.model.ReferenceModel` in float32; experts are stacked, ``experts.w1`` [E, I, L].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from k3_sglang.config import MLA_LATENT_NORM_EPS, TextConfig
from k3_sglang.tiny.train.experts import combine, route, spread
from k3_sglang.tiny.train.kda import kda
from k3_sglang.tiny.train.pointwise import gated, mix_norm, norm_gated, rms_norm, situ
from k3_sglang.tiny.train.products import Products

Parameters = Mapping[str, Tensor]


class TrainableModel:
    """Logits of whole sequences as a differentiable function of ``parameters``.

    ``loads`` holds, after a forward pass, how many token choices each expert of each sparse layer received.
    """

    def __init__(self, config: TextConfig, parameters: Parameters, *, bf16: bool = False) -> None:
        self.config, self.parameters = config, parameters
        self.products = Products(bf16)
        self.loads: dict[int, list[int]] = {}

    def hidden(self, ids: Tensor, experts: Parameters | None = None) -> Tensor:
        """Normed final hidden rows [B, T, hidden] for ids [B, T]; what follows a token never matters.

        Args:
            experts: other values of the routed experts by name, for training with rounded ones.
        """
        p, config = self.parameters, self.config
        values = p if experts is None else {**p, **experts}
        stream = F.embedding(ids, p["model.embed_tokens.weight"])
        bank: list[Tensor] = []
        for index in range(config.num_layers):
            stream = self._layer(index, values, stream, bank)
        score = p["model.output_attn_res_norm.weight"] * p["model.output_attn_res_proj.weight"][0]
        return mix_norm([*bank, stream], score, p["model.norm.weight"], config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab]."""
        return self.products.linear(hidden, self.parameters["lm_head.weight"])

    def _layer(self, index: int, p: Parameters, stream: Tensor, bank: list[Tensor]) -> Tensor:
        config, name = self.config, f"model.layers.{index}."
        norm = p[f"{name}input_layernorm.weight"]
        if bank:
            normed = mix_norm([*bank, stream], _score(p, f"{name}self_attention_res"), norm, config.rms_norm_eps)
        else:
            normed = rms_norm(stream, norm, config.rms_norm_eps)
        attend = self._kda if config.layer_kinds[index] == "kda" else self._mla
        attended = attend(p, f"{name}self_attn.", normed)
        if config.is_block_start(index):
            bank.append(stream)
            stream = attended
        else:
            stream = stream + attended
        norm = p[f"{name}post_attention_layernorm.weight"]
        normed = mix_norm([*bank, stream], _score(p, f"{name}mlp_res"), norm, config.rms_norm_eps)
        if config.is_dense(index):
            return stream + self._mlp(p, f"{name}mlp.", normed)
        return stream + self._moe(index, p, f"{name}block_sparse_moe.", normed)

    def _kda(self, p: Parameters, name: str, x: Tensor) -> Tensor:
        sizes, wide = self.config.kda, self.config.kda.projection_size
        names = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
        matrix = torch.cat([p[f"{name}{part}.weight"] for part in names])
        qkv, gate, low, strength = self.products.linear(x, matrix).split(
            [3 * wide, wide, sizes.head_dim, sizes.num_heads], -1
        )
        taps = torch.cat([p[f"{name}{part}_conv1d.weight"] for part in "qkv"]).squeeze(1)
        z = self.products.linear(low, p[f"{name}f_b_proj.weight"])
        bias = p[f"{name}dt_bias"].view(sizes.num_heads, -1)
        rate = p[f"{name}A_log"].exp()
        out = kda(qkv, z, torch.sigmoid(strength), taps, rate, bias, sizes.gate_lower_bound)
        output = norm_gated(out, gate, p[f"{name}o_norm.weight"], self.config.rms_norm_eps)
        return self.products.linear(output, p[f"{name}o_proj.weight"])

    def _mla(self, p: Parameters, name: str, x: Tensor) -> Tensor:
        m = self.config.mla
        batch, length, _ = x.shape
        names = ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")
        matrix = torch.cat([p[f"{name}{part}.weight"] for part in names])
        sizes = [m.q_lora_rank, m.kv_lora_rank, m.qk_rope_head_dim, m.num_heads * m.v_head_dim]
        compressed, latent, shared, gate = self.products.linear(x, matrix).split(sizes, -1)
        compressed = rms_norm(compressed, p[f"{name}q_a_layernorm.weight"], MLA_LATENT_NORM_EPS)
        latent = rms_norm(latent, p[f"{name}kv_a_layernorm.weight"], MLA_LATENT_NORM_EPS)
        q = (
            self.products.linear(compressed, p[f"{name}q_b_proj.weight"])
            .view(batch, length, m.num_heads, -1)
            .transpose(1, 2)
        )
        expanded = (
            self.products.linear(latent, p[f"{name}kv_b_proj.weight"])
            .view(batch, length, m.num_heads, -1)
            .transpose(1, 2)
        )
        k_nope, v = expanded.split([m.qk_nope_head_dim, m.v_head_dim], -1)
        k = torch.cat((k_nope, shared.unsqueeze(1).expand(-1, m.num_heads, -1, -1)), -1)
        # One width for keys and values: only then does PyTorch's CPU attention use its fused kernel.
        v = F.pad(v, (0, m.qk_head_dim - m.v_head_dim)) if m.qk_head_dim > m.v_head_dim else v
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=m.scaling)
        joined = attended[..., : m.v_head_dim].transpose(1, 2).reshape(batch, length, -1)
        return self.products.linear(gated(joined, gate), p[f"{name}o_proj.weight"])

    def _mlp(self, p: Parameters, name: str, x: Tensor) -> Tensor:
        both = torch.cat((p[f"{name}gate_proj.weight"], p[f"{name}up_proj.weight"]))
        beta, linear_beta = self.config.situ.beta, self.config.situ.linear_beta
        return self.products.linear(
            situ(self.products.linear(x, both), beta, linear_beta), p[f"{name}down_proj.weight"]
        )

    def _moe(self, index: int, p: Parameters, name: str, x: Tensor) -> Tensor:
        moe, config = self.config.moe, self.config
        flat = x.flatten(0, 1)
        logits = F.linear(flat, p[f"{name}gate.weight"])
        bias = p[f"{name}gate.e_score_correction_bias"]
        routing = route(logits, bias, moe.experts_per_token, moe.renormalize, moe.routed_scaling_factor)
        self.loads[index] = routing.counts
        rows = spread(self.products.linear(flat, p[f"{name}routed_expert_down_proj.weight"]), routing)
        both = torch.cat((p[f"{name}experts.w1"], p[f"{name}experts.w3"]), 1)
        inner = situ(self.products.grouped(rows, both, routing.counts), config.situ.beta, config.situ.linear_beta)
        routed = combine(self.products.grouped(inner, p[f"{name}experts.w2"], routing.counts), routing)
        normed = rms_norm(routed, p[f"{name}routed_expert_norm.weight"], config.rms_norm_eps)
        output = self.products.linear(normed, p[f"{name}routed_expert_up_proj.weight"]).view_as(x)
        return output + self._mlp(p, f"{name}shared_experts.", x)


def _score(p: Parameters, name: str) -> Tensor:
    """[hidden]: the part of a mixture's score that does not depend on the rows."""
    return p[f"{name}_norm.weight"] * p[f"{name}_proj.weight"][0]
