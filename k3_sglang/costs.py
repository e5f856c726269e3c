"""What K3's dimensions cost: bytes of KV and of state, parameters, FLOPs. Standard library only."""

from __future__ import annotations

from k3_sglang.config import TextConfig

FP32_BYTES = 4
BF16_BYTES = 2

# --- bytes --------------------------------------------------------------------------------------------------------


def kv_bytes_per_token(text: TextConfig, dtype_bytes: int = BF16_BYTES) -> int:
    """Bytes of latent KV one token occupies over all MLA layers (27,648 for the release in bf16)."""
    return len(text.mla_layers) * text.mla.latent_dim * dtype_bytes


def state_bytes_per_checkpoint(
    text: TextConfig, state_dtype_bytes: int = FP32_BYTES, conv_dtype_bytes: int = BF16_BYTES
) -> int:
    """Bytes of one checkpoint's recurrent and convolution state (449,372,160 for the release, fp32 + bf16)."""
    recurrent = text.kda.num_heads * text.kda.head_dim**2
    conv = (text.kda.conv_kernel_size - 1) * text.kda.conv_channels
    return len(text.kda_layers) * (recurrent * state_dtype_bytes + conv * conv_dtype_bytes)


# --- parameters ---------------------------------------------------------------------------------------------------


def kda_layer_parameters(text: TextConfig) -> int:
    """Parameters of one KDA attention block; ``A_log`` counts its real heads, not the file's padding."""
    kda, hidden = text.kda, text.hidden_size
    width = kda.projection_size
    projections = 5 * width * hidden + kda.head_dim * hidden + width * kda.head_dim + kda.num_heads * hidden
    return projections + kda.conv_channels * kda.conv_kernel_size + kda.num_heads + width + kda.head_dim


def mla_layer_parameters(text: TextConfig) -> int:
    """Parameters of one MLA attention block."""
    mla, hidden = text.mla, text.hidden_size
    value = mla.num_heads * mla.v_head_dim
    query = mla.q_lora_rank * (hidden + 1 + mla.num_heads * mla.qk_head_dim)
    up = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim) * mla.kv_lora_rank
    latent = mla.latent_dim * hidden + mla.kv_lora_rank + up
    return query + latent + 2 * value * hidden


def expert_parameters(text: TextConfig) -> int:
    """Parameters of one routed expert."""
    return 3 * text.moe.latent_size * text.moe.intermediate_size


def ffn_parameters(text: TextConfig, layer: int, experts: int) -> int:
    """Parameters of a layer's FFN, counting ``experts`` routed experts."""
    hidden, moe = text.hidden_size, text.moe
    if text.is_dense(layer):
        return 3 * hidden * text.dense_intermediate_size
    router = moe.num_experts * (hidden + 1)
    latent = 2 * hidden * moe.latent_size + moe.latent_size
    return experts * expert_parameters(text) + router + latent + 3 * hidden * moe.shared_intermediate_size


def layer_parameters(text: TextConfig, layer: int, experts: int) -> int:
    """Parameters of one layer: attention, FFN, four norms and two residual projections."""
    kda = text.layer_kinds[layer] == "kda"
    attention = kda_layer_parameters(text) if kda else mla_layer_parameters(text)
    return attention + ffn_parameters(text, layer, experts) + 6 * text.hidden_size


def total_parameters(text: TextConfig) -> int:
    """All parameters of the text model (2,779.48 billion for the release)."""
    layers = sum(layer_parameters(text, i, text.moe.num_experts) for i in range(text.num_layers))
    return layers + 2 * text.vocab_size * text.hidden_size + 3 * text.hidden_size


def active_parameters(text: TextConfig) -> int:
    """Parameters one token touches, not counting the input embedding table (104.19 billion for the release)."""
    layers = sum(layer_parameters(text, i, text.moe.experts_per_token) for i in range(text.num_layers))
    return layers + text.vocab_size * text.hidden_size + 3 * text.hidden_size


# --- FLOPs --------------------------------------------------------------------------------------------------------


def flops_per_token(text: TextConfig, context_len: int) -> int:
    """Forward FLOPs for one token at a context length: two per active weight, plus attention and the recurrence.

    Absorbed MLA costs 2 x heads x (latent + kv_lora) per cached token; the KDA recurrence three rank-one passes over a
    K x V state per head.
    """
    per_position = 2 * text.mla.num_heads * (text.mla.latent_dim + text.mla.kv_lora_rank)
    attention = len(text.mla_layers) * per_position * context_len
    recurrence = len(text.kda_layers) * 6 * text.kda.num_heads * text.kda.head_dim**2
    return 2 * active_parameters(text) + attention + recurrence
