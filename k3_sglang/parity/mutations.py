"""Mistakes that implementations of K3 have made, each written into a checkpoint: changed weights or a changed config.

Golden data records how far each moves the logits. A comparison that does not see one of them is worth nothing. Many
mistakes in code have an equivalent in weights: reading a matrix in another row order is permuting its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3_sglang.config import TextConfig
from k3_sglang.kernels.mxfp4 import GROUP_SIZE
from k3_sglang.parity.checkpoints import Tensors, read_tensors, write_checkpoint
from k3_sglang.parity.golden import Golden

UNBOUNDED = 1e4
"""A SiTU bound so far away that tanh is linear to float32."""


@dataclass(frozen=True)
class Mutation:
    """One mistake as it looks in a checkpoint."""

    change: Callable[[Tensors, TextConfig], None] | None = None
    """Replaces tensors in place."""
    text_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keys of ``text_config`` with their wrong values."""

    def write(self, golden: Golden, directory: Path) -> Path:
        """A mutated copy of the golden checkpoint."""
        tensors = read_tensors(golden.checkpoint)
        if self.change is not None:
            self.change(tensors, golden.config.text)
        return write_checkpoint(golden.checkpoint, directory, tensors, self.text_config)


def _named(tensors: Tensors, *endings: str) -> Iterator[str]:
    """Names with one of the endings."""
    return (name for name in list(tensors) if name.endswith(endings))


def _each(*endings: str, to: Callable[[Tensor], Tensor]) -> Mutation:
    """Replace every tensor whose name has one of the endings."""

    def change(tensors: Tensors, config: TextConfig) -> None:
        for name in _named(tensors, *endings):
            tensors[name] = to(tensors[name])

    return Mutation(change)


def _swapped(*pairs: tuple[str, str]) -> Mutation:
    """Exchange tensors whose names differ in their endings."""

    def change(tensors: Tensors, config: TextConfig) -> None:
        for first, second in pairs:
            for name in _named(tensors, first):
                other = name.removesuffix(first) + second
                tensors[name], tensors[other] = tensors[other], tensors[name]

    return Mutation(change)


# --- KDA ----------------------------------------------------------------------------------------------------------


def _a_log_per_channel(tensors: Tensors, config: TextConfig) -> None:
    """The rate exp(A_log) multiplies f_b(f_a(x)) + dt_bias, so a rate per channel can stand in both of these."""
    for name in _named(tensors, ".A_log"):
        rate = tensors[name][: config.kda.head_dim].exp()
        rows = rate.repeat(config.kda.num_heads)
        layer = name.removesuffix("A_log")
        tensors[f"{layer}f_b_proj.weight"] = tensors[f"{layer}f_b_proj.weight"].float() * rows.unsqueeze(1)
        tensors[f"{layer}dt_bias"] = tensors[f"{layer}dt_bias"] * rows
        tensors[name] = torch.zeros_like(tensors[name])


def _a_log_last_entries(tensors: Tensors, config: TextConfig) -> None:
    heads = config.kda.num_heads
    for name in _named(tensors, ".A_log"):
        stored = tensors[name].clone()
        stored[:heads] = tensors[name][-heads:]
        tensors[name] = stored


def _dt_bias_transposed(tensors: Tensors, config: TextConfig) -> None:
    for name in _named(tensors, ".dt_bias"):
        tensors[name] = tensors[name].view(config.kda.head_dim, config.kda.num_heads).t().flatten()


def _no_output_gate(layers: Callable[[TextConfig], tuple[int, ...]], doubled: str) -> Mutation:
    """sigmoid(0) is a half; doubling what follows makes it one."""

    def change(tensors: Tensors, config: TextConfig) -> None:
        for layer in layers(config):
            attention = f"language_model.model.layers.{layer}.self_attn."
            tensors[f"{attention}g_proj.weight"] = torch.zeros_like(tensors[f"{attention}g_proj.weight"])
            tensors[f"{attention}{doubled}"] = tensors[f"{attention}{doubled}"] * 2

    return Mutation(change)


# --- MLA ----------------------------------------------------------------------------------------------------------


def _scaled_by(width: Callable[[TextConfig], int]) -> Mutation:
    """Another softmax scale, ``width ** -0.5``, as longer queries."""

    def change(tensors: Tensors, config: TextConfig) -> None:
        factor = (config.mla.qk_head_dim / width(config)) ** 0.5
        for name in _named(tensors, ".q_b_proj.weight"):
            tensors[name] = tensors[name].float() * factor

    return Mutation(change)


def _kv_b_blocked(tensors: Tensors, config: TextConfig) -> None:
    mla = config.mla
    for name in _named(tensors, ".kv_b_proj.weight"):
        keys, values = tensors[name].split([mla.num_heads * mla.qk_nope_head_dim, mla.num_heads * mla.v_head_dim])
        per_head = [part.unflatten(0, (mla.num_heads, -1)) for part in (keys, values)]
        tensors[name] = torch.cat(per_head, 1).flatten(0, 1)


def _q_rope_first(tensors: Tensors, config: TextConfig) -> None:
    mla = config.mla
    for name in _named(tensors, ".q_b_proj.weight"):
        heads = tensors[name].unflatten(0, (mla.num_heads, -1))
        rope, nope = heads.split([mla.qk_rope_head_dim, mla.qk_nope_head_dim], 1)
        tensors[name] = torch.cat((nope, rope), 1).flatten(0, 1)


# --- MXFP4 --------------------------------------------------------------------------------------------------------


def _half_split(packed: Tensor) -> Tensor:
    """Bytes that decode to: low nibbles of a group first, then its high nibbles."""
    groups = packed.unflatten(-1, (-1, GROUP_SIZE // 2))
    codes = torch.cat((groups & 0xF, groups >> 4), -1)
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).flatten(-2)


def _sqrt_hidden(projection: Tensor) -> Tensor:
    return projection.float() * projection.shape[-1] ** -0.5


RES_NORMS = ("self_attention_res_norm.weight", "mlp_res_norm.weight", "output_attn_res_norm.weight")
RES_PROJECTIONS = ("self_attention_res_proj.weight", "mlp_res_proj.weight", "output_attn_res_proj.weight")

MUTATIONS: dict[str, Mutation] = {
    "a_log_read_per_channel": Mutation(_a_log_per_channel),
    "a_log_last_entries": Mutation(_a_log_last_entries),
    "a_log_ignored": _each(".A_log", to=torch.zeros_like),
    "all_rms_eps_1e-6": Mutation(text_config={"rms_norm_eps": 1e-6}),
    "attnres_norm_weight_ignored": _each(*RES_NORMS, to=torch.ones_like),
    "attnres_score_sqrt_d": _each(*RES_PROJECTIONS, to=_sqrt_hidden),
    "conv_taps_reversed": _each("_conv1d.weight", to=lambda taps: taps.flip(-1)),
    "kda_dt_bias_ignored": _each(".dt_bias", to=torch.zeros_like),
    "kda_dt_bias_transposed": Mutation(_dt_bias_transposed),
    "kda_gate_lower_bound_1": Mutation(text_config={"linear_attn_config": {"gate_lower_bound": -1.0}}),
    "kda_out_gate_missing": _no_output_gate(lambda config: config.kda_layers, "o_norm.weight"),
    "mla_out_gate_missing": _no_output_gate(lambda config: config.mla_layers, "o_proj.weight"),
    "mla_scale_nope_only": _scaled_by(lambda config: config.mla.qk_nope_head_dim),
    "mla_scale_v_dim": _scaled_by(lambda config: config.mla.v_head_dim),
    "mla_kv_b_blocked_layout": Mutation(_kv_b_blocked),
    "mla_q_rope_part_first": Mutation(_q_rope_first),
    "situ_linear_beta_ignored": Mutation(text_config={"activation_situ_linear_beta": UNBOUNDED}),
    "situ_beta_1": Mutation(text_config={"activation_situ_beta": 1.0}),
    "situ_replaced_by_silu": Mutation(
        text_config={"activation_situ_beta": UNBOUNDED, "activation_situ_linear_beta": UNBOUNDED}
    ),
    "situ_gate_up_swapped": _swapped(
        (".gate_proj.weight", ".up_proj.weight"),
        (".w1.weight_packed", ".w3.weight_packed"),
        (".w1.weight_scale", ".w3.weight_scale"),
    ),
    "router_bias_ignored": _each("e_score_correction_bias", to=torch.zeros_like),
    "router_no_renormalize": Mutation(text_config={"moe_renormalize": False}),
    "shared_experts_missing": _each("shared_experts.down_proj.weight", to=torch.zeros_like),
    "routed_experts_missing": _each("routed_expert_up_proj.weight", to=torch.zeros_like),
    "mxfp4_nibble_swap": _each(".weight_packed", to=lambda packed: (packed << 4) | (packed >> 4)),
    "mxfp4_half_split_order": _each(".weight_packed", to=_half_split),
    "mxfp4_scale_bias_128": _each(".weight_scale", to=lambda scale: scale - 1),
    "mxfp4_scale_transposed_groups": _each(".weight_scale", to=lambda scale: scale.flip(-1)),
}
"""By the names of ``mutations.json``."""

REFUSED: dict[str, Mapping[str, Any]] = {
    "router_softmax": {"moe_router_activation_func": "softmax"},
    "mla_rope_applied": {"mla_use_nope": False},
    "mla_out_gate_missing": {"mla_use_output_gate": False},
    "latent_norm_missing": {"latent_moe_use_norm": False},
    "situ_replaced_by_silu": {"hidden_act": "silu"},
}
"""Mistakes that a configuration could ask for by name, and that are refused when it is read."""

IN_CODE: dict[str, str] = {
    "attnres_no_reset": "which streams are added",
    "attnres_plain_residual": "no mixture at all",
    "attnres_bank_gets_mix": "which stream is frozen",
    "attnres_mix_normed_rows": "what is mixed",
    "attnres_sigmoid_weights": "another function of the scores",
    "attnres_block_off_by_one": "layers 1, 5, ... instead of 0, 4, ...; the config has a block size and no offset",
    "attnres_mlp_mix_missing": "a softmax over rows never becomes one row alone",
    "attnres_mlp_mix_before_attn_add": "which stream is mixed",
    "attnres_output_mix_missing": "a softmax over rows never becomes one row alone",
    "conv_without_silu": "an activation left out",
    "kda_no_l2norm": "a normalisation left out",
    "kda_gate_softplus": "another function of the gate",
    "kda_beta_times_2": "beta beyond the range of a sigmoid",
    "kda_decay_on_value_axis": "the recurrence itself",
    "kda_decay_after_update": "the recurrence itself",
    "kda_no_delta_rule": "the recurrence itself",
    "kda_gate_before_norm": "order of gate and norm",
    "kda_out_gate_silu": "another function of the gate",
    "mla_out_gate_silu": "another function of the gate",
    "mla_rope_applied": "positions; the configuration key for it is refused",
    "mla_kv_norm_missing": "a normalisation left out",
    "situ_sigmoid_of_scaled_gate": "another function of the gate",
    "router_bias_in_weights": "what the weights are made of",
    "router_softmax": "another function of the scores; the configuration key for it is refused",
    "router_equal_weights": "what the weights are made of",
}
"""Mistakes that no weight and no configuration can express, and what they would have to change."""
