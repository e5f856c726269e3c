"""Debugging aid: what each forward pass computed and left in the pools, written to files while a folder exists.

Start the engine with ``K3_SGLANG_DUMP_DIR`` naming a folder that does not exist yet. Create it when the passes of
interest come; every pass then writes ``pass-NNNNNN-rankR.safetensors`` before its tokens are answered. Remove or rename
the folder to stop. Nothing is registered without the variable. The files hold prompts and everything derived from them.

Names; T new tokens of the packed batch, S tokens of a request so far, r its place in the batch, i the layer:

- ``input_ids`` [T]; ``layer.i.attn_mix``, ``layer.i.ffn_mix``, ``layer.i.stream``, ``output_mix`` [T, hidden]
- ``router.i.ids``, ``router.i.weights`` [T, experts per token]
- ``request.r.layer.i.kda_state`` [H, V, K] and ``.kda_conv`` [3, q|k|v]: the slot of the state pool after the pass
- ``request.r.layer.i.mla_latent`` [S, latent]: the request's rows of the KV pool after the pass
- ``snapshot.r.layer.i.kda_state``, ``.kda_conv``: the state kept for the prefix cache, where the pass kept one

The file's metadata tells ``mode`` and, per request, ``prefix_lens``, ``seq_lens`` and ``snapshot_lens`` (tokens of this
pass before the kept state; empty without any), each a JSON list. With tensor parallelism every rank writes its heads.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from k3_sglang.compat import get_parallel
from k3_sglang.layers import moe
from k3_sglang.layers.attn_residual import ResidualBank
from k3_sglang.layers.decoder import K3TextModel
from k3_sglang.layers.moe import LatentMoE

logger = logging.getLogger(__name__)


class PassRecorder:
    """Watches one model: notes values during a pass, reads the pools after it, writes one file."""

    def __init__(self, model: K3TextModel, runner: Any, directory: Path) -> None:
        self._runner = runner
        self._directory = directory
        parallel = get_parallel()
        self._rank = parallel.pp_rank * parallel.tp_size + parallel.tp_rank
        self._passes = 0
        self._values: dict[str, torch.Tensor] | None = None
        """None while the folder does not exist: this pass is not recorded."""
        # Mixtures and routing are functions, not modules; the weight they are called with says which one it is.
        self._mixtures = {id(model.output_score.weight): "output_mix"}
        self._routers: dict[int, str] = {}
        self._kda_layers: list[int] = []
        self._mla_layers: list[int] = []
        for layer in model.stack:
            self._mixtures[id(layer.attention_score.weight)] = f"layer.{layer.index}.attn_mix"
            self._mixtures[id(layer.ffn_score.weight)] = f"layer.{layer.index}.ffn_mix"
            if isinstance(layer.ffn, LatentMoE):
                self._routers[id(layer.ffn.gate)] = f"router.{layer.index}"
            kinds = self._kda_layers if model.k3.layer_kinds[layer.index] == "kda" else self._mla_layers
            kinds.append(layer.index)

    def watch(self, model: K3TextModel) -> None:
        """Hook the model and the two functions that mix and route."""
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, with_kwargs=True)
        for layer in model.stack:
            layer.register_forward_pre_hook(self._note_embedding)
            layer.register_forward_hook(self._note_stream)
        self._watch_mixtures()
        self._watch_routing()

    def note(self, name: str, value: torch.Tensor) -> None:
        """Keep a copy of a value of the pass that is being recorded."""
        if self._values is not None:
            self._values[name] = value.detach().to("cpu", copy=True).contiguous()

    # --- during a pass ------------------------------------------------------------------------------------------

    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._passes += 1
        self._values = {} if self._directory.is_dir() else None
        self.note("input_ids", args[0] if args else kwargs["input_ids"])

    def _note_embedding(self, layer: Any, args: tuple[Any, ...]) -> None:
        if layer.index == 0:  # nothing is frozen yet, so its attention reads the embedding without a mixture
            self.note("layer.0.attn_mix", args[0])

    def _note_stream(self, layer: Any, args: tuple[Any, ...], stream: torch.Tensor) -> None:
        self.note(f"layer.{layer.index}.stream", stream)

    def _watch_mixtures(self) -> None:
        original, recorder = ResidualBank.mix, self

        def mix(self: ResidualBank, stream: torch.Tensor, score_weight: torch.Tensor) -> torch.Tensor:
            mixed = original(self, stream, score_weight)
            recorder.note(recorder._mixtures[id(score_weight)], mixed)
            return mixed

        ResidualBank.mix = mix

    def _watch_routing(self) -> None:
        original = moe.route

        def route(x: torch.Tensor, gate: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            ids, weights = original(x, gate, *rest)
            self.note(f"{self._routers[id(gate)]}.ids", ids)
            self.note(f"{self._routers[id(gate)]}.weights", weights)
            return ids, weights

        moe.route = route

    # --- after a pass -------------------------------------------------------------------------------------------

    def _end(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._values is None:
            return
        batch = next(value for value in (*args, *kwargs.values()) if hasattr(value, "forward_mode"))
        seq_lens = batch.seq_lens.tolist()
        self._note_pools(batch, seq_lens)
        snapshot_lens = self._note_snapshots(batch)
        extend = not batch.forward_mode.is_decode_or_idle()
        prefix_lens = list(batch.extend_prefix_lens_cpu) if extend else [length - 1 for length in seq_lens]
        facts = {"prefix_lens": prefix_lens, "seq_lens": seq_lens, "snapshot_lens": snapshot_lens}
        metadata = {"mode": batch.forward_mode.name, **{name: json.dumps(value) for name, value in facts.items()}}
        name = f"pass-{self._passes:06d}-rank{self._rank}.safetensors"
        unfinished = self._directory / f".{name}.tmp"
        save_file(self._values, unfinished, metadata)
        unfinished.replace(self._directory / name)
        self._values = None

    def _note_pools(self, batch: Any, seq_lens: list[int]) -> None:
        table, slots = self._runner.req_to_token_pool.req_to_token, self._slots(batch.req_pool_indices)
        for place, (request, length) in enumerate(zip(batch.req_pool_indices.tolist(), seq_lens, strict=True)):
            self._note_state(f"request.{place}", slots[place])
            rows = table[request, :length].long()
            for layer in self._mla_layers:
                pool = self._runner.token_to_kv_pool.get_key_buffer(layer)
                self.note(f"request.{place}.layer.{layer}.mla_latent", pool[rows].squeeze(1))

    def _note_snapshots(self, batch: Any) -> list[int]:
        """States kept by this pass; returns how many tokens of the pass each request's kept state has seen."""
        if batch.mamba_track_mask is None or not bool(batch.mamba_track_mask.any()):
            return []
        pool = self._runner.req_to_token_pool
        slots = pool.translate_mamba_indices(batch.mamba_track_indices).tolist()
        kept = batch.mamba_track_mask.tolist()
        for place, slot in enumerate(slots):
            if kept[place]:
                self._note_state(f"snapshot.{place}", slot)
        if batch.forward_mode.is_decode():
            return [1 if here else 0 for here in kept]
        lens = batch.mamba_track_aligned_lens().tolist()
        return [length if here else 0 for length, here in zip(lens, kept, strict=True)]

    def _note_state(self, name: str, slot: int) -> None:
        for layer in self._kda_layers:
            cache = self._runner.req_to_token_pool.mamba2_layer_cache(layer)
            self.note(f"{name}.layer.{layer}.kda_state", cache.temporal[slot])
            self.note(f"{name}.layer.{layer}.kda_conv", cache.conv[0][slot])

    def _slots(self, requests: torch.Tensor) -> list[int]:
        pool = self._runner.req_to_token_pool
        return pool.translate_mamba_indices(pool.get_mamba_indices(requests)).tolist()


def watch_runner(runner: Any, directory: Path) -> None:
    """Record the passes of a runner whose model, pools and backends are there.

    Raises:
        ValueError: the runner serves another model class than ours.
    """
    model = getattr(runner.model, "model", None)
    if not isinstance(model, K3TextModel):
        raise ValueError(
            f"passes of {type(runner.model).__module__}.{type(runner.model).__name__} cannot be recorded; serve K3 "
            "with --model-impl plugin, or unset K3_SGLANG_DUMP_DIR"
        )
    PassRecorder(model, runner, directory).watch(model)
    logger.warning("every forward pass is written to %s while that folder exists", directory)
