"""The decoder stack: embedding, layers with their residual mixtures, final mixture, norm and output head.

Architecture facts (each with its ``config.json`` key; equations in the layer files):

- 93 layers, 69 KDA and 24 gated MLA, by ``linear_attn_config.kda_layers`` / ``full_attn_layers`` (1-based there).
- Attention Residuals: each sub-layer reads a mixture of frozen streams (``attn_res_block_size``); at a block start the
  old stream is frozen and not added to the new one.
- layer 0 has a dense MLP (``first_k_dense_replace``), all others the Stable LatentMoE.
- untied embedding and head, no rotary embedding, ``rms_norm_eps`` 1e-5 except inside MLA.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from k3_sglang.compat import ParallelLMHead, PPMissingLayer, VocabParallelEmbedding
from k3_sglang.config import TextConfig
from k3_sglang.layers.attn_residual import ResidualBank, ResidualScore
from k3_sglang.layers.expert_weights import ExpertFormat
from k3_sglang.layers.ffn import DenseMLP
from k3_sglang.layers.kda import KDALayer
from k3_sglang.layers.mla import MLALayer
from k3_sglang.layers.moe import LatentMoE
from k3_sglang.layers.norm import rms_norm
from k3_sglang.layers.parallel import Ranks, Stage, weight


class K3DecoderLayer(torch.nn.Module):
    """One layer: mixture, attention, mixture, FFN."""

    def __init__(self, config: TextConfig, index: int, ranks: Ranks, experts: ExpertFormat) -> None:
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
        self.ffn = DenseMLP(config, ranks) if config.is_dense(index) else LatentMoE(config, ranks, experts, index)

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


class Handover(NamedTuple):
    """What one pipeline stage gives the next."""

    stream: torch.Tensor
    """Running stream [T, C]."""
    frozen: torch.Tensor
    """Rows of the residual bank [T, R, C]."""


class K3TextModel(torch.nn.Module):
    """Embedding, decoder stack, final mixture, norm and output head; a pipeline stage has its part of these."""

    def __init__(self, config: TextConfig, ranks: Ranks, experts: ExpertFormat, stage: Stage | None = None) -> None:
        super().__init__()
        self.k3 = config
        self.ranks = ranks
        self.stage = stage or Stage(range(config.num_layers), config.num_layers)
        held, first, last = self.stage.layers, self.stage.first, self.stage.last
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embed_tokens = VocabParallelEmbedding(*vocabulary) if first else PPMissingLayer()
        self.stack = tuple(K3DecoderLayer(config, i, ranks, experts) for i in held)
        """The layers held, in order; each knows its ``index`` in the whole model."""
        missing = [PPMissingLayer() for _ in range(config.num_layers - len(held))]
        self.layers = torch.nn.ModuleList([*missing[: held.start], *self.stack, *missing[held.start :]])
        width = config.hidden_size if last else 0
        self.output_score = ResidualScore(width)
        self.norm = weight(width)
        self.lm_head = ParallelLMHead(*vocabulary) if last else PPMissingLayer()
        self.max_bank_rows = sum(config.is_block_start(i) for i in range(held.stop))

    def forward(
        self,
        input_ids: torch.Tensor,
        forward_batch: Any,
        embeds: torch.Tensor | None,
        handed: Handover | None = None,
    ) -> torch.Tensor | Handover:
        """Token ids [T] (or embeddings [T, C], or an earlier stage's handover) to normed hidden states [T, C].

        A stage that is not the last returns what the next one needs instead.
        """
        if handed is None:
            stream = self.embed_tokens(input_ids) if embeds is None else embeds
            handed = Handover(stream, stream.new_empty(stream.shape[0], 0, stream.shape[1]))
        stream = handed.stream
        bank = ResidualBank(stream.shape[0], self.max_bank_rows, stream, self.k3.rms_norm_eps)
        bank.inherit(handed.frozen)
        for layer in self.stack:
            stream = layer(stream, bank, forward_batch)
        if not self.stage.last:
            return Handover(stream, bank.frozen)
        return rms_norm(bank.mix(stream, self.output_score.weight), self.norm, self.k3.rms_norm_eps)
