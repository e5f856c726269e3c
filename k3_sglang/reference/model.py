"""K3's text model, whole.

- Stream and bank: every ``attn_res_block_size`` layers the running stream is frozen into a bank and started anew;
  each sub-layer reads a softmax mixture of bank and stream (Attention Residuals, arXiv 2607.24653 section 2.2).
- Layers: KDA, with full MLA wherever ``full_attn_layers`` says (kernels and equations: :mod:`.attention`).
- FFN: dense in the first ``first_k_dense_replace`` layers, then Stable LatentMoE (:mod:`.moe`).
- No positions anywhere: order comes from the recurrence and the causal mask.
- One sequence at a time. A state object carries it on, by one token or by many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from k3_sglang.config import K3Config, TextConfig
from k3_sglang.reference.attention import KDA, MLA, KDAState, MLAState, Trace
from k3_sglang.reference.checkpoint import load_weights
from k3_sglang.reference.moe import MoE
from k3_sglang.reference.ops import Weights, mixture, mlp, rms_norm


@dataclass
class SequenceState:
    """Everything the model remembers of one sequence."""

    layers: list[KDAState | MLAState]
    length: int = 0
    """Tokens seen."""


def _part(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


class Layer:
    """One decoder layer without its residual bookkeeping."""

    def __init__(self, config: TextConfig, index: int, weights: Weights) -> None:
        self.config, self.weights = config, weights
        attention = _part(weights, "self_attn.")
        self.attention = KDA(config, attention) if config.layer_kinds[index] == "kda" else MLA(config, attention)
        self.moe = None if config.is_dense(index) else MoE(config, _part(weights, "block_sparse_moe."))

    def mix(self, which: str, rows: Sequence[Tensor]) -> Tensor:
        """Mixture read by ``self_attention`` or ``mlp``."""
        norm, projection = self.weights[f"{which}_res_norm.weight"], self.weights[f"{which}_res_proj.weight"]
        return mixture(rows, norm, projection, self.config.rms_norm_eps)

    def norm(self, which: str, x: Tensor) -> Tensor:
        """``input`` or ``post_attention`` norm."""
        return rms_norm(x, self.weights[f"{which}_layernorm.weight"], self.config.rms_norm_eps)

    def attend(self, x: Tensor, state: KDAState | MLAState, trace: Trace | None, name: str) -> Tensor:
        """Attention output for a normed input; moves the layer's state on."""
        if isinstance(self.attention, MLA):
            assert isinstance(state, MLAState)
            return self.attention(x, state, trace, name)
        assert isinstance(state, KDAState)
        output = self.attention(x, state)
        if trace is not None:
            trace[f"{name}.kda_state"], trace[f"{name}.kda_conv"] = state.recurrent, state.conv
        return output

    def feed_forward(self, x: Tensor) -> Tensor:
        """FFN output for a normed input."""
        if self.moe is not None:
            return self.moe(x)
        dense = [self.weights[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down")]
        return mlp(x, *dense, config=self.config.situ)


class ReferenceModel:
    """The text model over plain tensors. ``model(ids, state)`` gives logits and moves the state on."""

    def __init__(self, config: TextConfig, weights: Weights) -> None:
        self.config, self.weights = config, weights
        self.layers = [Layer(config, i, _part(weights, f"model.layers.{i}.")) for i in range(config.num_layers)]

    @classmethod
    def from_dir(cls, directory: str | Path, dtype: torch.dtype = torch.float32) -> ReferenceModel:
        """Load a release-layout checkpoint.

        Raises:
            ConfigError: config.json is missing or describes no K3 this code knows.
            ReferenceCheckpointError: the tensors are not exactly those config.json describes.
        """
        config = K3Config.from_dir(directory)
        return cls(config.text, load_weights(directory, config, dtype))

    def new_state(self) -> SequenceState:
        """State before the first token."""
        embedding = self.weights["model.embed_tokens.weight"]
        return SequenceState([layer.attention.new_state(embedding) for layer in self.layers])

    @torch.inference_mode()
    def __call__(self, ids: Sequence[int], state: SequenceState | None = None, trace: Trace | None = None) -> Tensor:
        """Logits [T, vocab] in the model dtype for the next T tokens of a sequence.

        Args:
            ids: token ids, at least one.
            state: what came before, moved on in place; None for a fresh sequence.
            trace: when given, receives ``layer.i.attn_mix``, ``.ffn_mix``, ``.stream``, ``.kda_state``, ``.kda_conv``,
                ``.mla_latent``, ``router.i.ids``, ``router.i.weights`` and ``output_mix``.

        Raises:
            ValueError: no ids, or an id outside the vocabulary.
        """
        if not ids or not 0 <= min(ids) <= max(ids) < self.config.vocab_size:
            raise ValueError(f"token ids {list(ids)[:8]}: need at least one, each in 0..{self.config.vocab_size - 1}")
        state = self.new_state() if state is None else state
        stream = F.embedding(torch.tensor(ids), self.weights["model.embed_tokens.weight"])
        bank: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            stream = self._layer(index, layer, stream, bank, state.layers[index], trace)
        state.length += len(ids)
        norm, projection = (self.weights[f"model.output_attn_res_{part}.weight"] for part in ("norm", "proj"))
        mixed = mixture([*bank, stream], norm, projection, self.config.rms_norm_eps)
        if trace is not None:
            trace["output_mix"] = mixed
        normed = rms_norm(mixed, self.weights["model.norm.weight"], self.config.rms_norm_eps)
        return F.linear(normed, self.weights["lm_head.weight"])

    def _layer(
        self,
        index: int,
        layer: Layer,
        stream: Tensor,
        bank: list[Tensor],
        state: KDAState | MLAState,
        trace: Trace | None,
    ) -> Tensor:
        """One layer with its mixtures; returns the new stream and, at a block start, freezes the old one."""
        name = f"layer.{index}"
        attention_input = layer.mix("self_attention", [*bank, stream]) if bank else stream
        starts_block = self.config.is_block_start(index)
        if starts_block:
            bank.append(stream)
        attended = layer.attend(layer.norm("input", attention_input), state, trace, name)
        stream = attended if starts_block else stream + attended
        ffn_input = layer.mix("mlp", [*bank, stream])
        normed = layer.norm("post_attention", ffn_input)
        stream = stream + layer.feed_forward(normed)
        if trace is not None:
            trace[f"{name}.attn_mix"], trace[f"{name}.ffn_mix"], trace[f"{name}.stream"] = (
                attention_input,
                ffn_input,
                stream,
            )
            if layer.moe is not None:
                trace[f"router.{index}.ids"], trace[f"router.{index}.weights"] = layer.moe.route(normed)
        return stream

    def greedy(self, ids: Sequence[int], max_new_tokens: int, state: SequenceState | None = None) -> list[int]:
        """Most likely continuation, one token at a time with carried state; special ids do not stop it."""
        state = self.new_state() if state is None else state
        logits = self(ids, state)[-1]
        output = [int(logits.argmax())]
        while len(output) < max_new_tokens:
            output.append(int(self(output[-1:], state)[-1].argmax()))
        return output
