"""What the tiny K3 consists of, without its numbers: configuration files and control tokens. Standard library only.

The layout is the release's, the image tower and its projector included.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from k3_sglang.config import ARCHITECTURE, TEXT_ARCHITECTURE
from k3_sglang.tiny.vocabulary import BASE_TOKENS

SPECIAL_TOKENS: Final = 256
"""Control tokens after the byte pieces, as many as in the release; unnamed ones are reserved."""

VOCAB_SIZE: Final = BASE_TOKENS + SPECIAL_TOKENS

MAX_POSITION_EMBEDDINGS: Final = 32_768

NAMED_SPECIALS: Final = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
"""Distance from the first control token, as in the release, to spelling."""


def special_id(spelling: str) -> int:
    """Id of a named control token."""
    return BASE_TOKENS + next(offset for offset, text in NAMED_SPECIALS.items() if text == spelling)


_IDS: Final = {
    "bos_token_id": special_id("[BOS]"),
    "eos_token_id": special_id("<|end_of_msg|>"),
    "pad_token_id": special_id("[PAD]"),
}

_QUANTIZATION: Final = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": {
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}

_TEXT: Final = {
    **_IDS,
    "architectures": [TEXT_ARCHITECTURE],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 9,
    "intermediate_size": 256,
    "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
    "rms_norm_eps": 1e-05,
    "initializer_range": 0.02,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 4,
    "tie_word_embeddings": False,
    "use_cache": True,
    "num_nextn_predict_layers": 0,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 9],
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "gate_lower_bound": -5.0,
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "num_shared_experts": 2,
    "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 64,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "quantization_config": _QUANTIZATION,
}

_VISION: Final = {
    "patch_size": 14,
    "init_pos_emb_height": 16,
    "init_pos_emb_width": 16,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "patch_embed_proj_bias": False,
    "vt_num_hidden_layers": 2,
    "vt_hidden_size": 64,
    "vt_intermediate_size": 128,
    "vt_num_attention_heads": 3,
    "qkv_hidden_size": 96,
    "attn_bias": False,
    "linear_bias": False,
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "activation_func": "gelu_pytorch_tanh",
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmergerv2",
    "mm_hidden_size": 64,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "text_hidden_size": _TEXT["hidden_size"],
}

CONFIG: Final[dict[str, Any]] = {
    **_IDS,
    "architectures": [ARCHITECTURE],
    "model_type": "kimi_k3",
    "dtype": "bfloat16",
    "ignore_index": -100,
    "image_placeholder": "<|kimi_image_placeholder|>",
    "media_placeholder_token_id": special_id("<|media_pad|>"),
    "tie_word_embeddings": False,
    "text_config": _TEXT,
    "vision_config": _VISION,
}
"""``config.json``. The release's ``auto_map`` is left out: it names Python files that this directory does not hold."""

PREPROCESSOR_CONFIG: Final[dict[str, Any]] = {
    "media_proc_cfg": {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "in_patch_limit": 65_536,
        "patch_limit_on_one_side": 512,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "fixed_output_tokens": None,
        "transparent_bg_fill_stage": "after_resize",
        "transparent_bg_config": {
            "pattern": "chessboard",
            "chessboard_square_size": 8,
            "chessboard_square_on_top_left": True,
            "chessboard_white_value": 255,
            "chessboard_gray_value": 180,
        },
    }
}
"""``preprocessor_config.json``: the release's rules for pictures."""

GENERATION_CONFIG: Final[dict[str, Any]] = {**_IDS, "do_sample": True, "temperature": 1.0, "top_p": 0.95}
"""``generation_config.json``: the sampling the release recommends."""

TOKENIZER_CONFIG: Final[dict[str, Any]] = {
    "tokenizer_class": "TikTokenTokenizer",
    "model_max_length": MAX_POSITION_EMBEDDINGS,
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "unk_token": "[UNK]",
    "pad_token": "[PAD]",
    "added_tokens_decoder": {
        str(BASE_TOKENS + offset): {
            "content": content,
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        }
        for offset, content in NAMED_SPECIALS.items()
    },
}
"""``tokenizer_config.json``."""


class Files(NamedTuple):
    """Contents of the configuration files that depend on the vocabulary."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_config: dict[str, Any]


def files_for(base_tokens: int) -> Files:
    """The same model with another vocabulary of ``base_tokens`` byte pieces before the control tokens."""
    moved = base_tokens - BASE_TOKENS
    ids = {name: token + moved for name, token in _IDS.items()}
    media = {"media_placeholder_token_id": CONFIG["media_placeholder_token_id"] + moved}
    text = {**_TEXT, **ids, "vocab_size": base_tokens + SPECIAL_TOKENS}
    decoder = {str(int(token) + moved): entry for token, entry in TOKENIZER_CONFIG["added_tokens_decoder"].items()}
    return Files(
        {**CONFIG, **ids, **media, "text_config": text},
        {**GENERATION_CONFIG, **ids},
        {**TOKENIZER_CONFIG, "added_tokens_decoder": decoder},
    )
