"""SGLang's entry classes for Kimi K3: parallel layout, one engine step, loading a release checkpoint."""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Iterable
from typing import Any

import torch

from k3_sglang.compat import (
    LogitsProcessor,
    PPProxyTensors,
    get_model,
    get_parallel,
    get_pp_indices,
    pad_mm_tokens,
    tensor_model_parallel_all_reduce,
)
from k3_sglang.config import TextConfig
from k3_sglang.costs import expert_parameters
from k3_sglang.layers.decoder import Handover, K3TextModel
from k3_sglang.layers.expert_weights import ExpertFormat, choose_format
from k3_sglang.layers.gpu import check_engine, on_gpu
from k3_sglang.layers.parallel import Ranks, Stage
from k3_sglang.loading.progress import followed
from k3_sglang.loading.slots import load_all
from k3_sglang.loading.table import PREFIX, VISION_PREFIXES, build_table
from k3_sglang.processors.embedding import ImageInputs, forget_features
from k3_sglang.vision.support import image_support, why_text_only

logger = logging.getLogger(__name__)

EXPERTS_ENV = "K3_SGLANG_EXPERTS"
"""``auto``, ``packed``, ``unpacked`` or ``fused``, see :func:`k3_sglang.layers.expert_weights.choose_format`."""


def _ranks() -> Ranks:
    parallel = get_parallel()
    if parallel.attn_tp_size != parallel.tp_size:
        raise ValueError(
            f"attention data parallelism (attention TP {parallel.attn_tp_size} inside TP {parallel.tp_size}) is not "
            "supported by this K3 model class; start without --enable-dp-attention"
        )
    return Ranks(parallel.tp_rank, parallel.tp_size, tensor_model_parallel_all_reduce, parallel.moe_ep_size)


def _stage(config: TextConfig) -> Stage:
    parallel = get_parallel()
    return Stage(range(*get_pp_indices(config.num_layers, parallel.pp_rank, parallel.pp_size)), config.num_layers)


def expert_format(config: TextConfig, ranks: Ranks, stage: Stage) -> ExpertFormat:
    """How this process keeps routed experts: the ``K3_SGLANG_EXPERTS`` variable, by default what fits in memory."""
    layers = sum(not config.is_dense(layer) for layer in stage.layers)
    values = layers * config.moe.num_experts * expert_parameters(config) // ranks.size
    processes = ranks.size * get_parallel().pp_size
    chosen = choose_format(
        os.environ.get(EXPERTS_ENV, "auto"),
        stored_packed=config.experts_packed,
        unpacked_bytes=values * torch.get_default_dtype().itemsize,
        available_bytes=os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes,
        on_gpu=on_gpu(),
    )
    logger.info("routed experts are kept %s", chosen)
    return chosen


class KimiK3ForConditionalGeneration(torch.nn.Module):
    """SGLang entry class for release checkpoints (``architectures[0]`` of the outer config), images included."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "", **_: Any) -> None:
        super().__init__()
        text = getattr(config, "text_config", config)
        self.config = config
        self.quant_config = quant_config
        k3, ranks = TextConfig.from_dict(text.to_dict()), _ranks()
        if on_gpu():
            check_engine()
            logger.warning("our K3 class on CUDA has not been measured on a GPU")
        stage = _stage(k3)
        self.model = K3TextModel(k3, ranks, expert_format(k3, ranks, stage), stage)
        self.start_layer, self.end_layer = stage.layers.start, stage.layers.stop
        self.logits_processor = LogitsProcessor(text)
        self.why_text_only = why_text_only(get_model().model_path)
        self.image_support = None if self.why_text_only else image_support(get_model().model_path)
        self.images = ImageInputs(self.image_support.vision) if self.image_support and stage.first else None
        """Embeds pictures; only the first pipeline stage does."""
        self.complete = False
        """Whether every parameter holds a value, all of them of one checkpoint (or all of them dummies)."""
        self._discarded = False
        """Whether only a whole checkpoint can make it complete again."""
        self.from_checkpoint = False
        """Whether these values were read from a checkpoint, which could be read again."""

    def pad_input_ids(self, input_ids: array[int], mm_inputs: Any) -> array[int]:
        """Prompt ids with placeholders replaced by values of each picture's content (SGLang's prefix cache keys)."""
        return pad_mm_tokens(input_ids, mm_inputs)

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
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """One engine step over the packed tokens of a batch; ``positions`` is unused, K3 has no positional encoding.

        Raises:
            RuntimeError: a checkpoint was read in part only, and no whole one since.
        """
        if not self.complete:
            raise RuntimeError("the weights are incomplete: a checkpoint was read in part only; load a whole one")
        handed = None
        if pp_proxy_tensors is not None:
            handed = Handover(pp_proxy_tensors["hidden_states"], pp_proxy_tensors["attn_res_bank"])
        with torch.inference_mode():
            if self.images is not None and input_embeds is None:
                input_embeds = self.images.embed(input_ids, forward_batch, self)
            hidden = self.model(input_ids, forward_batch, input_embeds, handed)
        if isinstance(hidden, Handover):
            return PPProxyTensors({"hidden_states": hidden.stream, "attn_res_bank": hidden.frozen.contiguous()})
        # Outside inference mode: the sampler scales the logits in place.
        return self.logits_processor(input_ids, hidden, self.model.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill every parameter from a release checkpoint.

        Raises:
            CheckpointError: tensors are missing, unknown, repeated or misshaped.
        """
        skipped = 0
        slots = build_table(self.model) | ({} if self.images is None else self.images.slots())

        def wanted() -> Iterable[tuple[str, torch.Tensor]]:
            nonlocal skipped
            for name, tensor in weights:
                if not name.startswith(VISION_PREFIXES):
                    yield self.checkpoint_name(name), tensor
                elif self.images is not None:
                    yield name, tensor
                else:
                    skipped += 1

        self.discard_weights()
        with torch.no_grad():
            count = load_all(slots, followed(wanted(), len(slots)), "checkpoint")
        self._discarded = False
        self.post_load_weights()
        self.from_checkpoint = True
        logger.info("loaded %d tensors", count)
        if skipped and self.why_text_only is not None:
            logger.warning("%d image-tower tensors not loaded, text only: %s", skipped, self.why_text_only)

    def discard_weights(self) -> None:
        """Compute nothing more with what the parameters hold."""
        self.complete = self.from_checkpoint = False
        self._discarded = True

    def post_load_weights(self) -> None:
        """What follows on filling the parameters, by whatever loader; SGLang calls it after dummy and sharded loads."""
        for layer in self.model.stack:
            layer.weights_changed()
        forget_features()
        self.complete = not self._discarded

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
