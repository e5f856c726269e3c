"""Fixtures for the launcher: a K3 checkpoint folder that has little more than its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3_sglang.config import K3Config
from k3_sglang.loading.inventory import expected_tensors
from tests.launch.sparse_file import write_header_only

MAX_CONTEXT_LEN = 4096


def config_json() -> dict[str, Any]:
    """A four-layer K3 in the release's layout."""
    text: dict[str, Any] = {
        "hidden_size": 64,
        "vocab_size": 512,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": MAX_CONTEXT_LEN,
        "attn_res_block_size": 4,
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "num_attention_heads": 8,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 32,
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "head_dim": 16,
            "num_heads": 8,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "text_config": text,
        "eos_token_id": 500,
        "pad_token_id": 501,
        "media_placeholder_token_id": 502,
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Folder named ``small-k3`` with a config.json, an empty vocabulary and weights that are all zero."""
    directory = tmp_path / "small-k3"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config_json()), encoding="utf-8")
    (directory / "tiktoken.model").touch()
    specs = expected_tensors(K3Config.from_dict(config_json()))
    write_header_only(directory / "model.safetensors", {name: spec.shape for name, spec in specs.items()})
    return directory
