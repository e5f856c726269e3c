"""Kimi K3's language model inside SGLang: entry classes and the decoder stack.

Architecture facts (each with its ``config.json`` key; equations in the layer files):

- 93 layers, 69 KDA and 24 gated MLA, by ``linear_attn_config.kda_layers`` / ``full_attn_layers`` (1-based there).
- Attention Residuals: each sub-layer reads a mixture of frozen streams (``attn_res_block_size``); at a block start the
  old stream is frozen and not added to the new one.
- layer 0 has a dense MLP (``first_k_dense_replace``), all others the Stable LatentMoE.
- untied embedding and head, no rotary embedding, ``rms_norm_eps`` 1e-5 except inside MLA.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from k3_sglang.compat import (
    LogitsProcessor,
    ParallelLMHead,
    VocabParallelEmbedding,
    get_parallel,
    tensor_model_parallel_all_reduce,
)
from k3_sglang.config import TextConfig
from k3_sglang.layers.attn_residual import ResidualBank, ResidualScore
from k3_sglang.layers.ffn import DenseMLP
from k3_sglang.layers.kda import KDALayer
from k3_sglang.layers.mla import MLALayer
from k3_sglang.layers.moe import LatentMoE
from k3_sglang.layers.norm import rms_norm
from k3_sglang.layers.parallel import Ranks, weight
from k3_sglang.loading.slots import load_all
from k3_sglang.loading.table import PREFIX, VISION_PREFIXES, build_table

logger = logging.getLogger(__name__)


class K3DecoderLayer(torch.nn.Module):
    """One layer: mixture, attention, mixture, FFN."""

    def __init__(self, config: TextConfig, index: int, ranks: Ranks) -> None:
        super().__init__()
        self.index = index
        self.eps = config.rms_norm_eps
        self.block_start = config.is_block_start(index)
        self.attention_score = ResidualScore(config.hidden_size)
        self.ffn_score = ResidualScore(config.hidden_size)
        self.input_norm = weight(config.hidden_size)
        self.post_attention_norm = weight(config.hidden_size)
        kda = config.layer_kinds[index] == "kda"
        self.attention = KDALayer(config, index, ranks) if kda else MLALayer(config, index, ranks)
        self.ffn = DenseMLP(config, ranks) if config.is_dense(index) else LatentMoE(config, ranks)

    def weights_changed(self) -> None:
        """Drop values derived from weights."""
        if isinstance(self.attention, KDALayer):
            self.attention.attn.cpu_constants = None

    def forward(self, stream: torch.Tensor, bank: ResidualBank, forward_batch: Any) -> torch.Tensor:
        """Advance the running stream [T, C] by this layer."""
        mixed = bank.mix(stream, self.attention_score.weight) if bank.num_frozen else stream
        if self.block_start:
            bank.freeze(stream)
        attended = self.attention(rms_norm(mixed, self.input_norm, self.eps), forward_batch)
        stream = attended if self.block_start else stream + attended
        mixed = bank.mix(stream, self.ffn_score.weight)
        return stream + self.ffn(rms_norm(mixed, self.post_attention_norm, self.eps))


class K3TextModel(torch.nn.Module):
    """Embedding, decoder stack, final mixture, norm and output head."""

    def __init__(self, config: TextConfig, ranks: Ranks) -> None:
        super().__init__()
        self.k3 = config
        self.ranks = ranks
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.stack = tuple(K3DecoderLayer(config, i, ranks) for i in range(config.num_layers))
        self.layers = torch.nn.ModuleList(self.stack)
        self.output_score = ResidualScore(config.hidden_size)
        self.norm = weight(config.hidden_size)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.max_bank_rows = sum(config.is_block_start(i) for i in range(config.num_layers))

    def forward(self, input_ids: torch.Tensor, forward_batch: Any, embeds: torch.Tensor | None) -> torch.Tensor:
        """Token ids [T] (or embeddings [T, C]) to normed hidden states [T, C]."""
        stream = self.embed_tokens(input_ids) if embeds is None else embeds
        bank = ResidualBank(stream.shape[0], self.max_bank_rows, stream, self.k3.rms_norm_eps)
        for layer in self.stack:
            stream = layer(stream, bank, forward_batch)
        return rms_norm(bank.mix(stream, self.output_score.weight), self.norm, self.k3.rms_norm_eps)


def _ranks() -> Ranks:
    parallel = get_parallel()
    if parallel.attn_tp_size != parallel.tp_size:
        raise ValueError(
            f"attention data parallelism (attention TP {parallel.attn_tp_size} inside TP {parallel.tp_size}) is not "
            "supported by this K3 model class; start without --enable-dp-attention"
        )
    if parallel.pp_size != 1:
        raise ValueError(f"pipeline parallelism of {parallel.pp_size} is not supported by this K3 model class; use 1")
    return Ranks(parallel.tp_rank, parallel.tp_size, tensor_model_parallel_all_reduce)


class KimiK3ForConditionalGeneration(torch.nn.Module):
    """SGLang entry class for release checkpoints (``architectures[0]`` of the outer config); serves text."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "", **_: Any) -> None:
        super().__init__()
        text = getattr(config, "text_config", config)
        self.config = config
        self.quant_config = quant_config
        self.model = K3TextModel(TextConfig.from_dict(text.to_dict()), _ranks())
        self.logits_processor = LogitsProcessor(text)

    def get_input_embeddings(self) -> torch.nn.Module:
        """The embedding module (SGLang asks for it)."""
        return self.model.embed_tokens

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
    ) -> Any:
        """One engine step over the packed tokens of a batch; ``positions`` is unused, K3 has no positional encoding."""
        with torch.inference_mode():
            hidden = self.model(input_ids, forward_batch, input_embeds)
        # Outside inference mode: the sampler scales the logits in place.
        return self.logits_processor(input_ids, hidden, self.model.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter from a release checkpoint.

        Raises:
            CheckpointError: tensors are missing, unknown, repeated or misshaped.
        """
        skipped = 0

        def text_tensors() -> Iterable[tuple[str, torch.Tensor]]:
            nonlocal skipped
            for name, tensor in weights:
                if name.startswith(VISION_PREFIXES):
                    skipped += 1
                else:
                    yield self.checkpoint_name(name), tensor

        with torch.no_grad():
            count = load_all(build_table(self.model), text_tensors(), "checkpoint")
        for layer in self.model.stack:
            layer.weights_changed()
        logger.info("loaded %d text tensors", count)
        if skipped:
            logger.warning("%d image-tower tensors not loaded: this model class serves text only", skipped)

    @staticmethod
    def checkpoint_name(name: str) -> str:
        """The release's name of a tensor in the file (the identity for release checkpoints)."""
        return name


class KimiK3LinearForCausalLM(KimiK3ForConditionalGeneration):
    """Text-only checkpoints, whose tensors lack the ``language_model.`` prefix."""

    @staticmethod
    def checkpoint_name(name: str) -> str:
        """The release's name of a tensor stored without the outer prefix."""
        return name if name.startswith(PREFIX) else PREFIX + name


EntryClass = [KimiK3ForConditionalGeneration, KimiK3LinearForCausalLM]
