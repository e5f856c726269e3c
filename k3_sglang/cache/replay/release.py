"""Dimensions of the released K3, so that a replay knows its bytes and FLOPs without a checkpoint directory."""

from __future__ import annotations

from k3_sglang.config import KDAConfig, MLAConfig, MoEConfig, SituConfig, TextConfig

_NUM_LAYERS = 93

RELEASE_TEXT = TextConfig(
    num_layers=_NUM_LAYERS,
    hidden_size=7168,
    vocab_size=163840,
    dense_intermediate_size=33792,
    num_dense_layers=1,
    rms_norm_eps=1e-5,
    max_position_embeddings=1048576,
    attn_res_block_size=12,
    # Every fourth layer is full attention, and so is the last.
    layer_kinds=tuple("mla" if i % 4 == 3 or i == _NUM_LAYERS - 1 else "kda" for i in range(_NUM_LAYERS)),
    kda=KDAConfig(num_heads=96, head_dim=128, conv_kernel_size=4, gate_lower_bound=-5.0),
    mla=MLAConfig(
        num_heads=96, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
    moe=MoEConfig(
        num_experts=896,
        experts_per_token=16,
        num_shared_experts=2,
        intermediate_size=3072,
        latent_size=3584,
        renormalize=True,
        routed_scaling_factor=1.0,
    ),
    situ=SituConfig(beta=1.0, linear_beta=1.0),
    experts_packed=True,
)
"""Only what ``costs`` reads is meant; activation and router constants are placeholders of the right type."""
