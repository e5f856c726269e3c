"""K3 dimensions as frozen dataclasses; the bytes, parameters and FLOPs that follow from them are in ``costs``.

Read from the release's ``config.json``; standard library only, so the agent runtime and the planner can use it too.
Layer indices are 0-based everywhere in this project; the config's ``kda_layers`` / ``full_attn_layers`` are 1-based.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

LayerKind = Literal["kda", "mla"]
"""``kda``: recurrent layer with a fixed-size state. ``mla``: full attention over a per-token latent."""

ARCHITECTURE = "KimiK3ForConditionalGeneration"
"""Outer architecture name of the release (``config.json: architectures[0]``)."""

TEXT_ARCHITECTURE = "KimiLinearForCausalLM"
"""Architecture name inside ``text_config`` of the release."""

MLA_LATENT_NORM_EPS = 1e-6
"""eps of ``q_a_layernorm`` and ``kv_a_layernorm``: the released code builds them without the config's 1e-5."""

KDA_L2NORM_EPS = 1e-6
"""eps added to the sum of squares when q and k are normalised in a KDA layer."""


class ConfigError(ValueError):
    """A ``config.json`` that is not a K3 this code can run; the message names key, value and what is allowed."""


def _require(mapping: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in mapping or mapping[key] is None:
        raise ConfigError(f"{where}.{key} is missing; a K3 config.json must have it")
    return mapping[key]


def _must_equal(mapping: Mapping[str, Any], where: str, expected: Mapping[str, Any]) -> None:
    for key, value in expected.items():
        if key in mapping and mapping[key] != value:
            raise ConfigError(f"{where}.{key} is {mapping[key]!r}; this implementation of K3 supports only {value!r}")


@dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention dimensions (``text_config.linear_attn_config``); K and V heads have the same width."""

    num_heads: int
    head_dim: int
    conv_kernel_size: int
    gate_lower_bound: float

    @property
    def projection_size(self) -> int:
        """Width of each of q, k, v and of the output gate: heads x head_dim."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution, q | k | v concatenated."""
        return 3 * self.projection_size


@dataclass(frozen=True)
class MLAConfig:
    """Gated NoPE multi-head latent attention dimensions (``text_config``)."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head: the nope part and the shared part (never rotated in K3)."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values cached per token and layer: normed latent and shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scaling(self) -> float:
        """Softmax scale, ``qk_head_dim ** -0.5``."""
        return self.qk_head_dim**-0.5


@dataclass(frozen=True)
class MoEConfig:
    """Stable LatentMoE dimensions (``text_config``)."""

    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    intermediate_size: int
    latent_size: int
    renormalize: bool
    routed_scaling_factor: float

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the one MLP in which the release stores all shared experts."""
        return self.num_shared_experts * self.intermediate_size


@dataclass(frozen=True)
class SituConfig:
    """SiTU activation constants (``activation_situ_beta``, ``activation_situ_linear_beta``)."""

    beta: float
    linear_beta: float


@dataclass(frozen=True)
class TextConfig:
    """The K3 language model (``text_config``)."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    dense_intermediate_size: int
    num_dense_layers: int
    rms_norm_eps: float
    max_position_embeddings: int
    attn_res_block_size: int
    layer_kinds: tuple[LayerKind, ...]
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig
    situ: SituConfig
    experts_packed: bool
    """True when routed experts are stored as MXFP4 (``quantization_config`` present)."""

    @classmethod
    def from_dict(cls, text: Mapping[str, Any]) -> TextConfig:
        """Build from a ``text_config`` mapping.

        Raises:
            ConfigError: a key is missing or has a value this implementation does not support.
        """
        where = "text_config"
        _must_equal(
            text,
            where,
            {
                "hidden_act": "situ",
                "mla_use_nope": True,
                "mla_use_output_gate": True,
                "latent_moe_use_norm": True,
                "moe_router_activation_func": "sigmoid",
                "topk_method": "noaux_tc",
                "num_expert_group": 1,
                "topk_group": 1,
                "moe_layer_freq": 1,
                "tie_word_embeddings": False,
                "num_nextn_predict_layers": 0,
            },
        )
        linear = _require(text, "linear_attn_config", where)
        _must_equal(linear, f"{where}.linear_attn_config", {"use_full_rank_gate": True, "short_conv_kernel_size": 4})
        num_layers = int(_require(text, "num_hidden_layers", where))
        return cls(
            num_layers=num_layers,
            hidden_size=int(_require(text, "hidden_size", where)),
            vocab_size=int(_require(text, "vocab_size", where)),
            dense_intermediate_size=int(_require(text, "intermediate_size", where)),
            num_dense_layers=int(_require(text, "first_k_dense_replace", where)),
            rms_norm_eps=float(_require(text, "rms_norm_eps", where)),
            max_position_embeddings=int(_require(text, "max_position_embeddings", where)),
            attn_res_block_size=int(_require(text, "attn_res_block_size", where)),
            layer_kinds=_layer_kinds(linear, num_layers),
            kda=_kda_config(linear),
            mla=_mla_config(text),
            moe=_moe_config(text),
            situ=SituConfig(
                beta=float(_require(text, "activation_situ_beta", where)),
                linear_beta=float(_require(text, "activation_situ_linear_beta", where)),
            ),
            experts_packed=_experts_packed(text),
        )

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based indices of the recurrent layers."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """0-based indices of the full-attention layers."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "mla")

    def is_dense(self, layer: int) -> bool:
        """Whether a layer's FFN is the dense MLP instead of the mixture of experts."""
        return layer < self.num_dense_layers

    def is_block_start(self, layer: int) -> bool:
        """Whether Attention Residuals freeze the stream into the bank at this layer (``attn_res_block_size``)."""
        return layer % self.attn_res_block_size == 0


def _layer_kinds(linear: Mapping[str, Any], num_layers: int) -> tuple[LayerKind, ...]:
    where = "text_config.linear_attn_config"
    kda = set(_require(linear, "kda_layers", where))
    full = set(_require(linear, "full_attn_layers", where))
    everything = set(range(1, num_layers + 1))
    if kda & full or kda | full != everything:
        wrong = sorted((kda & full) | ((kda | full) ^ everything))
        raise ConfigError(
            f"{where}: kda_layers and full_attn_layers must name each of layers 1..{num_layers} exactly once; "
            f"wrong or missing: {wrong[:8]}"
        )
    return tuple("kda" if i + 1 in kda else "mla" for i in range(num_layers))


def _kda_config(linear: Mapping[str, Any]) -> KDAConfig:
    where = "text_config.linear_attn_config"
    bound = float(_require(linear, "gate_lower_bound", where))
    if bound >= 0:
        raise ConfigError(f"{where}.gate_lower_bound is {bound}; it must be negative (the release has -5.0)")
    return KDAConfig(
        num_heads=int(_require(linear, "num_heads", where)),
        head_dim=int(_require(linear, "head_dim", where)),
        conv_kernel_size=int(_require(linear, "short_conv_kernel_size", where)),
        gate_lower_bound=bound,
    )


def _mla_config(text: Mapping[str, Any]) -> MLAConfig:
    where = "text_config"
    return MLAConfig(
        num_heads=int(_require(text, "num_attention_heads", where)),
        q_lora_rank=int(_require(text, "q_lora_rank", where)),
        kv_lora_rank=int(_require(text, "kv_lora_rank", where)),
        qk_nope_head_dim=int(_require(text, "qk_nope_head_dim", where)),
        qk_rope_head_dim=int(_require(text, "qk_rope_head_dim", where)),
        v_head_dim=int(_require(text, "v_head_dim", where)),
    )


def _moe_config(text: Mapping[str, Any]) -> MoEConfig:
    where = "text_config"
    moe = MoEConfig(
        num_experts=int(_require(text, "num_experts", where)),
        experts_per_token=int(_require(text, "num_experts_per_token", where)),
        num_shared_experts=int(_require(text, "num_shared_experts", where)),
        intermediate_size=int(_require(text, "moe_intermediate_size", where)),
        latent_size=int(_require(text, "routed_expert_hidden_size", where)),
        renormalize=bool(_require(text, "moe_renormalize", where)),
        routed_scaling_factor=float(_require(text, "routed_scaling_factor", where)),
    )
    if not 0 < moe.experts_per_token <= moe.num_experts:
        raise ConfigError(
            f"{where}.num_experts_per_token is {moe.experts_per_token}; it must be between 1 and "
            f"num_experts = {moe.num_experts}"
        )
    return moe


def _experts_packed(text: Mapping[str, Any]) -> bool:
    quantization = text.get("quantization_config")
    if quantization is None:
        return False
    if quantization.get("format") != "mxfp4-pack-quantized":
        raise ConfigError(
            f"text_config.quantization_config.format is {quantization.get('format')!r}; "
            "allowed: 'mxfp4-pack-quantized', or no quantization_config at all"
        )
    return True


@dataclass(frozen=True)
class K3Config:
    """A K3 checkpoint's ``config.json``."""

    architecture: str
    text: TextConfig
    vision: Mapping[str, Any] | None
    eos_token_id: int
    pad_token_id: int
    media_placeholder_token_id: int

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> K3Config:
        """Build from a parsed ``config.json``.

        Raises:
            ConfigError: not a K3, or a K3 with features this implementation does not support.
        """
        architectures = raw.get("architectures") or [None]
        if architectures[0] != ARCHITECTURE:
            raise ConfigError(f"config.json: architectures[0] is {architectures[0]!r}; allowed: {ARCHITECTURE!r}")
        text = _require(raw, "text_config", "config.json")
        return cls(
            architecture=ARCHITECTURE,
            text=TextConfig.from_dict(text),
            vision=raw.get("vision_config"),
            eos_token_id=int(_require(raw, "eos_token_id", "config.json")),
            pad_token_id=int(_require(raw, "pad_token_id", "config.json")),
            media_placeholder_token_id=int(_require(raw, "media_placeholder_token_id", "config.json")),
        )

    @classmethod
    def from_dir(cls, directory: str | Path) -> K3Config:
        """Read ``config.json`` of a checkpoint directory.

        Raises:
            ConfigError: the file is missing, is not JSON, or does not describe a supported K3.
        """
        path = Path(directory) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"{path} does not exist; a K3 checkpoint directory must contain config.json") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        return cls.from_dict(raw)
