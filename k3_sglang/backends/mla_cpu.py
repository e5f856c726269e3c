"""SGLang's attention backend for gated MLA on a CPU: absorbed attention over the latent KV pool.

The pool holds one row of kv_lora + rope values per token and layer; keys are whole rows, values their first kv_lora
entries. A prefill computes only the new tokens' queries: cached prefix tokens are read, never recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from k3_sglang.compat import AttentionBackend
from k3_sglang.kernels.mla import mla_decode, mla_prefill


@dataclass(frozen=True)
class Sequence:
    """One sequence's part of a prefill batch."""

    rows: slice
    """Rows of the packed batch."""
    prefix_len: int
    locations: torch.Tensor
    """[prefix_len + extend_len] int64 rows of the token pool."""


@dataclass(frozen=True)
class Step:
    """What every MLA layer of one forward pass needs to know about the batch."""

    sequences: tuple[Sequence, ...] = ()
    """Filled for prefill."""
    locations: torch.Tensor | None = None
    """Decode: [B, S] int64 rows of the token pool; what stands after a sequence's length is not followed."""
    lens: tuple[int, ...] = ()
    """Decode: B sequence lengths, the new token included."""


class MLACpuBackend(AttentionBackend):
    """Full-attention half of K3's hybrid backend on a CPU; registered as ``k3_cpu``."""

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._step = Step()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Resolve token locations once; all MLA layers of the pass share them."""
        mode = forward_batch.forward_mode
        table = self.req_to_token_pool.req_to_token
        if mode.is_idle():
            self._step = Step()
        elif mode.is_decode():
            lens = tuple(forward_batch.seq_lens_cpu.tolist())
            locations = table[forward_batch.req_pool_indices.long(), : max(lens)].long()
            self._step = Step(locations=locations, lens=lens)
        elif mode.is_extend() and not mode.is_target_verify():
            self._step = Step(sequences=self._sequences(table, forward_batch))
        else:
            raise NotImplementedError(
                f"forward mode {mode.name} is not supported by the CPU MLA backend; start without speculative decoding"
            )

    @staticmethod
    def _sequences(table: torch.Tensor, forward_batch: Any) -> tuple[Sequence, ...]:
        sequences = []
        start = 0
        for request, prefix_len, extend_len in zip(
            forward_batch.req_pool_indices.tolist(),
            forward_batch.extend_prefix_lens_cpu,
            forward_batch.extend_seq_lens_cpu,
            strict=True,
        ):
            locations = table[request, : prefix_len + extend_len].long()
            sequences.append(Sequence(slice(start, start + extend_len), prefix_len, locations))
            start += extend_len
        return tuple(sequences)

    def _store(self, key: torch.Tensor, layer: Any, forward_batch: Any) -> torch.Tensor:
        """Write the new tokens' rows and return the layer's pool as [tokens, kv_lora + rope]."""
        pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id).squeeze(1)
        pool.index_copy_(0, forward_batch.out_cache_loc.long(), key.view(-1, layer.head_dim).to(pool.dtype))
        return pool

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """One token per sequence: q [B, H, kv_lora + rope] and k [B, 1, kv_lora + rope] to [B, H * kv_lora]."""
        assert save_kv_cache and self._step.locations is not None
        pool = self._store(k, layer, forward_batch)
        query = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        o = mla_decode(query, pool, self._step.locations, self._step.lens, layer.v_head_dim, layer.scaling)
        return o.flatten(1)

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """Several tokens per sequence: q [T, H, kv_lora + rope] and k [T, 1, kv_lora + rope] to [T, H * kv_lora]."""
        assert save_kv_cache
        pool = self._store(k, layer, forward_batch)
        query = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        output = query.new_zeros(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for sequence in self._step.sequences:
            latent = pool.index_select(0, sequence.locations)
            output[sequence.rows] = mla_prefill(
                query[sequence.rows], latent, sequence.prefix_len, layer.v_head_dim, layer.scaling
            )
        return output.flatten(1)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Sequence length for padding rows of captured graphs (there are none on a CPU)."""
        return 1

    def support_triton(self) -> bool:
        """No Triton on this device."""
        return False
