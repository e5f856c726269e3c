"""The one table from the release's tensor names to parameters (architecture: checkpoint tensors of the release)."""

from __future__ import annotations

import torch

from k3_sglang.config import TextConfig
from k3_sglang.kernels.mxfp4 import GROUP_SIZE, NAN_SCALE
from k3_sglang.kernels.mxfp4 import decode as decode_mxfp4
from k3_sglang.layers.attn_residual import ResidualScore
from k3_sglang.layers.decoder import K3TextModel
from k3_sglang.layers.expert_weights import UnpackedExperts
from k3_sglang.layers.ffn import DenseMLP
from k3_sglang.layers.kda import KDALayer
from k3_sglang.layers.mla import MLALayer
from k3_sglang.layers.moe import LatentMoE
from k3_sglang.layers.parallel import Ranks
from k3_sglang.loading.inventory import (
    PROJECTOR_PREFIX,
    TEXT_PREFIX,
    TOWER_PREFIX,
    a_log_stored_len,
    expected_text_tensors,
    layer_and_expert,
)
from k3_sglang.loading.slots import BYTES, DTYPES, FLOATS, CheckpointError, Pair, Slot

PREFIX = TEXT_PREFIX

VISION_PREFIXES = (TOWER_PREFIX, PROJECTOR_PREFIX)
"""Prefixes of the image tower and its projector."""

Slots = dict[str, Slot]


def build_table(model: K3TextModel) -> Slots:
    """Slots of every text tensor of a release checkpoint, for the parameters (this rank's part) of ``model``.

    Tensors that other ranks hold, of other layers or experts, have slots too: they are checked, and nothing is kept.

    Raises:
        RuntimeError: this table and the inventory of a checkpoint contradict each other (a mistake in this package).
    """
    config, ranks = model.k3, model.ranks
    slots: Slots = {}
    if model.stage.first:
        slots[f"{PREFIX}model.embed_tokens.weight"] = _vocab(model.embed_tokens, config)
    if model.stage.last:
        slots[f"{PREFIX}lm_head.weight"] = _vocab(model.lm_head, config)
        slots[f"{PREFIX}model.norm.weight"] = _whole(model.norm)
        slots |= _score(model.output_score, f"{PREFIX}model.output_attn_res")
    for layer in model.stack:
        name = f"{PREFIX}model.layers.{layer.index}."
        slots[f"{name}input_layernorm.weight"] = _whole(layer.input_norm)
        slots[f"{name}post_attention_layernorm.weight"] = _whole(layer.post_attention_norm)
        slots |= _score(layer.attention_score, f"{name}self_attention_res")
        slots |= _score(layer.ffn_score, f"{name}mlp_res")
        if isinstance(layer.attention, KDALayer):
            slots |= _kda(layer.attention, config, ranks, f"{name}self_attn.")
        else:
            slots |= _mla(layer.attention, config, ranks, f"{name}self_attn.")
        if isinstance(layer.ffn, DenseMLP):
            slots |= _dense(layer.ffn, config, ranks, f"{name}mlp.")
        else:
            slots |= _moe(layer.ffn, config, ranks, f"{name}block_sparse_moe.")
    return _completed(slots, model)


def _completed(slots: Slots, model: K3TextModel) -> Slots:
    """A slot for every tensor of the inventory, in its order; what has no writer must belong to another rank."""
    complete: Slots = {}
    for name, spec in expected_text_tensors(model.k3).items():
        slot = slots.pop(name, None)
        if slot is None and not _elsewhere(name, model):
            raise RuntimeError(f"tensor {name} belongs to this rank and the table has no place for it")
        if slot is not None and slot.shape != spec.shape:
            raise RuntimeError(f"tensor {name}: the table says {slot.shape}, the inventory {spec.shape}")
        complete[name] = slot or Slot(spec.shape, tuple(DTYPES[dtype] for dtype in spec.dtypes), _drop)
    if slots:
        raise RuntimeError(f"the table has tensors that no checkpoint holds: {', '.join(list(slots)[:3])}")
    return complete


def _elsewhere(name: str, model: K3TextModel) -> bool:
    """Whether another rank holds all of a tensor: another stage, or the group that an expert was dealt to."""
    layer, expert = layer_and_expert(name)
    if layer is None:
        return not (model.stage.first if "embed_tokens" in name else model.stage.last)
    return layer not in model.stage.layers or (
        expert is not None and expert not in model.ranks.experts(model.k3.moe.num_experts)
    )


def _drop(tensor: torch.Tensor) -> None:
    del tensor


# --- kinds of slot ------------------------------------------------------------------------------------------------


def _whole(parameter: torch.Tensor) -> Slot:
    """A replicated tensor."""
    return Slot(tuple(parameter.shape), FLOATS, lambda tensor: _copy(parameter, tensor))


def _rows(parameter: torch.Tensor, total: int, ranks: Ranks, *rest: int) -> Slot:
    """A tensor whose first dimension is split over ranks into ``parameter``; ``rest`` are its other dimensions."""
    return Slot((total, *rest), FLOATS, lambda tensor: _copy(parameter, ranks.rows(tensor)))


def _columns(parameter: torch.Tensor, rows: int, total: int, ranks: Ranks) -> Slot:
    """A matrix whose second dimension is split over ranks."""
    return Slot((rows, total), FLOATS, lambda tensor: _copy(parameter, ranks.rows(tensor, dim=1)))


def _copy(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    parameter.copy_(tensor.reshape(parameter.shape))


def _vocab(module: torch.nn.Module, config: TextConfig) -> Slot:
    """Embedding or output head: upstream's module knows which rows are this rank's."""
    parameter = module.weight

    def write(tensor: torch.Tensor) -> None:
        parameter.weight_loader(parameter, tensor)  # type: ignore[union-attr]

    return Slot((config.vocab_size, config.hidden_size), FLOATS, write)


def _score(score: ResidualScore, name: str) -> Slots:
    """Norm and projection of a mixture point fold into one fp32 score vector."""
    hidden = score.weight.shape[0]
    pair = Pair(lambda norm, proj: _copy(score.weight, norm.float() * proj.float().flatten()))
    return {
        f"{name}_norm.weight": Slot((hidden,), FLOATS, pair.part(0)),
        f"{name}_proj.weight": Slot((1, hidden), FLOATS, pair.part(1)),
    }


# --- layers -------------------------------------------------------------------------------------------------------


def _kda(layer: KDALayer, config: TextConfig, ranks: Ranks, name: str) -> Slots:
    kda, hidden = config.kda, config.hidden_size
    total = kda.projection_size
    qkv, gate, f_a, beta, _ = layer.in_proj.split(layer.in_sizes)
    q, k, v = qkv.chunk(3)
    conv_q, conv_k, conv_v = layer.conv.chunk(3)

    def a_log(tensor: torch.Tensor) -> None:
        _copy(layer.A_log, ranks.rows(tensor[: kda.num_heads]))

    stored_heads = a_log_stored_len(kda.num_heads, kda.head_dim)
    return {
        f"{name}q_proj.weight": _rows(q, total, ranks, hidden),
        f"{name}k_proj.weight": _rows(k, total, ranks, hidden),
        f"{name}v_proj.weight": _rows(v, total, ranks, hidden),
        f"{name}g_proj.weight": _rows(gate, total, ranks, hidden),
        f"{name}f_a_proj.weight": _whole(f_a),
        f"{name}b_proj.weight": _rows(beta, kda.num_heads, ranks, hidden),
        f"{name}f_b_proj.weight": _rows(layer.f_b_proj, total, ranks, kda.head_dim),
        f"{name}q_conv1d.weight": _rows(conv_q, total, ranks, 1, kda.conv_kernel_size),
        f"{name}k_conv1d.weight": _rows(conv_k, total, ranks, 1, kda.conv_kernel_size),
        f"{name}v_conv1d.weight": _rows(conv_v, total, ranks, 1, kda.conv_kernel_size),
        f"{name}A_log": Slot((stored_heads,), FLOATS, a_log),
        f"{name}dt_bias": _rows(layer.dt_bias, total, ranks),
        f"{name}o_norm.weight": _whole(layer.o_norm),
        f"{name}o_proj.weight": _columns(layer.o_proj, hidden, total, ranks),
    }


def _mla(layer: MLALayer, config: TextConfig, ranks: Ranks, name: str) -> Slots:
    mla, hidden = config.mla, config.hidden_size
    q_a, latent, shared_key, gate = layer.in_proj.split(layer.in_sizes)
    kv_a = layer.in_proj.narrow(0, mla.q_lora_rank, mla.latent_dim)
    assert latent.shape[0] + shared_key.shape[0] == kv_a.shape[0]
    value_width = mla.num_heads * mla.v_head_dim
    up_width = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return {
        f"{name}q_a_proj.weight": _whole(q_a),
        f"{name}q_a_layernorm.weight": _whole(layer.q_a_norm),
        f"{name}q_b_proj.weight": _rows(layer.q_b_proj, mla.num_heads * mla.qk_head_dim, ranks, mla.q_lora_rank),
        f"{name}kv_a_proj_with_mqa.weight": _whole(kv_a),
        f"{name}kv_a_layernorm.weight": _whole(layer.kv_a_norm),
        f"{name}kv_b_proj.weight": _rows(layer.kv_b_proj, up_width, ranks, mla.kv_lora_rank),
        f"{name}g_proj.weight": _rows(gate, value_width, ranks, hidden),
        f"{name}o_proj.weight": _columns(layer.o_proj, hidden, value_width, ranks),
    }


def _dense(layer: DenseMLP, config: TextConfig, ranks: Ranks, name: str) -> Slots:
    width, hidden = config.dense_intermediate_size, config.hidden_size
    gate, up = layer.gate_up_proj.chunk(2)
    return {
        f"{name}gate_proj.weight": _rows(gate, width, ranks, hidden),
        f"{name}up_proj.weight": _rows(up, width, ranks, hidden),
        f"{name}down_proj.weight": _columns(layer.down_proj, hidden, width, ranks),
    }


def _moe(layer: LatentMoE, config: TextConfig, ranks: Ranks, name: str) -> Slots:
    moe, hidden = config.moe, config.hidden_size
    shared_width = moe.shared_intermediate_size
    latent_down, shared_gate_up = layer.in_proj.split(layer.in_sizes)
    shared_gate, shared_up = shared_gate_up.chunk(2)
    slots: Slots = {
        f"{name}gate.weight": _whole(layer.gate),
        f"{name}gate.e_score_correction_bias": _whole(layer.e_score_correction_bias),
        f"{name}routed_expert_down_proj.weight": _whole(latent_down),
        f"{name}routed_expert_norm.weight": _whole(layer.routed_expert_norm),
        f"{name}routed_expert_up_proj.weight": _whole(layer.up_proj),
        f"{name}shared_experts.gate_proj.weight": _rows(shared_gate, shared_width, ranks, hidden),
        f"{name}shared_experts.up_proj.weight": _rows(shared_up, shared_width, ranks, hidden),
        f"{name}shared_experts.down_proj.weight": _columns(layer.shared_down_proj, hidden, shared_width, ranks),
    }
    for expert in range(moe.num_experts):
        slots |= _expert(layer, expert, config, ranks, f"{name}experts.{expert}.")
    return slots


def _expert(layer: LatentMoE, expert: int, config: TextConfig, ranks: Ranks, name: str) -> Slots:
    """w1 and w3 are split by rows, w2 by columns, over the ranks that share this expert; none if others hold it."""
    width, latent = config.moe.intermediate_size, config.moe.latent_size
    experts, inner = layer.experts, ranks.within_expert
    if expert not in experts.held:
        return {}
    if not isinstance(experts, UnpackedExperts):
        w1, w3, w2 = experts.packed(expert)
        return {
            **_packed_matrix(*w1, width, latent, 0, inner, f"{name}w1"),
            **_packed_matrix(*w3, width, latent, 0, inner, f"{name}w3"),
            **_packed_matrix(*w2, latent, width, 1, inner, f"{name}w2"),
        }
    place = expert - experts.held.start
    gate, up = experts.w13[place].chunk(2)
    return {
        **_expert_matrix(gate, width, latent, 0, config, inner, f"{name}w1"),
        **_expert_matrix(up, width, latent, 0, config, inner, f"{name}w3"),
        **_expert_matrix(experts.w2[place], latent, width, 1, config, inner, f"{name}w2"),
    }


def _packed_matrix(
    codes: torch.Tensor, scales: torch.Tensor, rows: int, columns: int, dim: int, ranks: Ranks, name: str
) -> Slots:
    """One expert matrix [rows, columns] that stays as the file has it, split over ranks along ``dim``."""

    def write_scales(tensor: torch.Tensor) -> None:
        if bool((tensor == NAN_SCALE).any()):
            raise CheckpointError(f"tensor {name}.weight_scale has a scale byte {NAN_SCALE} (NaN): the file is damaged")
        _copy(scales, ranks.rows(tensor, dim))

    return {
        f"{name}.weight_packed": Slot((rows, columns // 2), BYTES, lambda t: _copy(codes, ranks.rows(t, dim))),
        f"{name}.weight_scale": Slot((rows, columns // GROUP_SIZE), BYTES, write_scales),
    }


def _expert_matrix(
    parameter: torch.Tensor, rows: int, columns: int, dim: int, config: TextConfig, ranks: Ranks, name: str
) -> Slots:
    """One expert matrix [rows, columns] kept unpacked, split over ranks along ``dim``; the file may have it packed."""

    def write(tensor: torch.Tensor) -> None:
        _copy(parameter, ranks.rows(tensor, dim))

    if not config.experts_packed:
        return {f"{name}.weight": Slot((rows, columns), FLOATS, write)}
    pair = Pair(lambda packed, scale: write(decode_mxfp4(packed, scale)))
    return {
        f"{name}.weight_packed": Slot((rows, columns // 2), BYTES, pair.part(0)),
        f"{name}.weight_scale": Slot((rows, columns // GROUP_SIZE), BYTES, pair.part(1)),
    }
