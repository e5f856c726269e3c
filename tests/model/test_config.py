"""Dimensions read from config.json, and the published figures that follow from the release's dimensions."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from k3_sglang import costs
from k3_sglang.config import ConfigError, K3Config, TextConfig
from k3_sglang.tiny.recipe import CONFIG

RELEASE_VISION_PARAMETERS = 401.2e6 + 46.1e6


def release_text() -> dict[str, Any]:
    """The release's text dimensions."""
    full_attention = [*range(4, 93, 4), 93]
    text: dict[str, Any] = copy.deepcopy(CONFIG["text_config"])
    text |= {
        "num_hidden_layers": 93,
        "hidden_size": 7168,
        "vocab_size": 163840,
        "intermediate_size": 33792,
        "max_position_embeddings": 1048576,
        "attn_res_block_size": 12,
        "num_attention_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
    }
    text["linear_attn_config"] |= {
        "full_attn_layers": full_attention,
        "kda_layers": [i for i in range(1, 94) if i not in full_attention],
        "head_dim": 128,
        "num_heads": 96,
    }
    return text


@pytest.fixture
def release() -> TextConfig:
    """The release's text model."""
    return TextConfig.from_dict(release_text())


def test_layer_kinds_of_the_release(release: TextConfig) -> None:
    assert len(release.kda_layers) == 69
    assert len(release.mla_layers) == 24
    assert release.mla_layers[-2:] == (91, 92)
    assert sum(release.is_block_start(i) for i in range(release.num_layers)) == 8


def test_published_parameter_counts(release: TextConfig) -> None:
    total = costs.total_parameters(release) + RELEASE_VISION_PARAMETERS
    assert total / 1e9 == pytest.approx(2779.93, abs=0.005)
    assert costs.active_parameters(release) / 1e9 == pytest.approx(104.19, abs=0.005)
    routed = 92 * 896 * costs.expert_parameters(release)
    assert routed / 1e9 == pytest.approx(2722.74, abs=0.005)


def test_published_memory_figures(release: TextConfig) -> None:
    assert costs.kv_bytes_per_token(release) == 27_648
    assert costs.kv_bytes_per_token(release, dtype_bytes=1) == 13_824
    assert costs.state_bytes_per_checkpoint(release) == 449_372_160
    assert costs.state_bytes_per_checkpoint(release, state_dtype_bytes=2) == 232_316_928
    assert costs.state_bytes_per_checkpoint(release) // costs.kv_bytes_per_token(release) == 16_253


def test_flops_grow_with_the_context_by_the_attention_layers_only(release: TextConfig) -> None:
    short, long = costs.flops_per_token(release, 0), costs.flops_per_token(release, 1000)
    assert long - short == 1000 * 24 * 2 * 96 * (576 + 512)
    assert short > 2 * costs.active_parameters(release)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "silu"),
        ("mla_use_nope", False),
        ("num_expert_group", 4),
        ("tie_word_embeddings", True),
        ("num_nextn_predict_layers", 1),
    ],
)
def test_features_this_model_does_not_have_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"text_config.{key} is {value!r}"):
        TextConfig.from_dict({**release_text(), key: value})


def test_a_layer_in_neither_list_is_named() -> None:
    text = release_text()
    text["linear_attn_config"]["kda_layers"].remove(7)
    with pytest.raises(ConfigError, match=r"wrong or missing: \[7\]"):
        TextConfig.from_dict(text)


@pytest.mark.parametrize("key", ["hidden_size", "linear_attn_config", "routed_expert_hidden_size"])
def test_a_missing_key_is_named(key: str) -> None:
    text = release_text()
    del text[key]
    with pytest.raises(ConfigError, match=f"text_config.{key} is missing"):
        TextConfig.from_dict(text)


def test_unknown_quantization_is_refused() -> None:
    with pytest.raises(ConfigError, match="mxfp4-pack-quantized"):
        TextConfig.from_dict({**release_text(), "quantization_config": {"format": "int-quantized"}})


def test_a_directory_without_config_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must contain config.json"):
        K3Config.from_dir(tmp_path)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        K3Config.from_dir(tmp_path)
