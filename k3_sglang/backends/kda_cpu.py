"""SGLang's KDA backend for a CPU: binds the chunkwise and one-token KDA kernels to the state pool.

A request owns one working slot of the pool; per KDA layer a slot holds the last three inputs of the short convolution,
[3, q|k|v channels], and the recurrent state, [H, V, K] float32. Under the ``extra_buffer`` strategy the scheduler also
asks for a snapshot: the state at one position, copied into a slot that the prefix cache will own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from k3_sglang.backends.threads import ThreadChoice
from k3_sglang.compat import MambaAttnBackendBase
from k3_sglang.kernels.kda import fold_gate, folded_gate, kda_chunk, kda_decode, normalise_qk
from k3_sglang.kernels.short_conv import conv_decode, conv_prefill


@dataclass(frozen=True)
class Sequence:
    """One sequence's part of a prefill batch."""

    start: int
    """First row in the packed batch."""
    extend_len: int
    slot: int
    """Working slot in the state pool."""
    has_state: bool
    """Whether the slot holds the state of a prefix (else the sequence starts from zeros)."""
    snapshot_len: int
    """Rows after which the state is to be kept; 0 for no snapshot."""
    snapshot_slot: int

    @property
    def rows(self) -> slice:
        """Rows of the packed batch."""
        return slice(self.start, self.start + self.extend_len)


@dataclass(frozen=True)
class Step:
    """What every KDA layer of one forward pass needs to know about the batch."""

    slots: torch.Tensor
    """[B] int64 working slots."""
    sequences: tuple[Sequence, ...] = ()
    """Filled for prefill."""
    snapshot_from: torch.Tensor | None = None
    """[n] int64 working slots to copy after a decode step, None when there is nothing to keep."""
    snapshot_to: torch.Tensor | None = None


class KDACpuBackend(MambaAttnBackendBase):
    """Replaces upstream's KDA backend, whose kernels need a GPU."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        check_conv_dtype(self.req_to_token_pool.mamba_pool.mamba_cache.conv[0].dtype, model_runner.dtype)
        self._step = Step(torch.empty(0, dtype=torch.int64))
        self._threads = ThreadChoice()

    # --- once per forward pass ----------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Resolve slots and snapshots once; all KDA layers of the pass share them."""
        self._threads.set_for(forward_batch.input_ids.shape[0])
        slots = self.req_to_token_pool.get_mamba_indices(forward_batch.req_pool_indices)
        slots = self._translate_mamba_indices(slots).long()
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self._step = Step(slots)
        elif mode.is_decode():
            self._step = self._decode_step(slots, forward_batch.mamba_track_mask, self._snapshot_slots(forward_batch))
        elif mode.is_extend() and not mode.is_target_verify():
            self._step = Step(slots, self._sequences(slots, forward_batch, self._snapshot_slots(forward_batch)))
        else:
            raise NotImplementedError(
                f"forward mode {mode.name} is not supported by the CPU KDA backend; start without speculative decoding"
            )

    def _snapshot_slots(self, forward_batch: Any) -> torch.Tensor | None:
        """[B] slots of the pool for snapshots, None when the scheduler keeps none."""
        if forward_batch.mamba_track_mask is None:
            return None
        return self._translate_mamba_indices(forward_batch.mamba_track_indices).long()

    @staticmethod
    def _decode_step(slots: torch.Tensor, mask: torch.Tensor | None, snapshot_slots: torch.Tensor | None) -> Step:
        if mask is None or snapshot_slots is None:
            return Step(slots)
        rows = mask.nonzero().flatten()
        return Step(slots, (), slots[rows], snapshot_slots[rows]) if rows.numel() else Step(slots)

    @staticmethod
    def _sequences(
        slots: torch.Tensor, forward_batch: Any, snapshot_pool_slots: torch.Tensor | None
    ) -> tuple[Sequence, ...]:
        extend_lens = list(forward_batch.extend_seq_lens_cpu)
        prefix_lens = list(forward_batch.extend_prefix_lens_cpu)
        count = len(extend_lens)
        tracked = [False] * count
        snapshot_lens, snapshot_slots = [0] * count, [0] * count
        if snapshot_pool_slots is not None:
            tracked = forward_batch.mamba_track_mask.tolist()
            snapshot_lens = forward_batch.mamba_track_aligned_lens().tolist()
            snapshot_slots = snapshot_pool_slots.tolist()
        sequences = []
        start = 0
        for i, slot in enumerate(slots.tolist()):
            sequences.append(
                Sequence(
                    start=start,
                    extend_len=extend_lens[i],
                    slot=slot,
                    has_state=prefix_lens[i] > 0,
                    snapshot_len=snapshot_lens[i] if tracked[i] else 0,
                    snapshot_slot=snapshot_slots[i] if tracked[i] else 0,
                )
            )
            start += extend_lens[i]
        return tuple(sequences)

    # --- once per layer -----------------------------------------------------------------------------------------

    def forward_decode(
        self, layer: Any, forward_batch: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """One token per sequence.

        Args:
            layer: the RadixLinearAttention with conv weights and gate constants.
            mixed_qkv: [B, 3 * H * K] projections before the convolution.
            a: [B, H * K] raw forget gate. b: [1, B, H] raw beta.

        Returns:
            [1, B, H, V] in the dtype of ``mixed_qkv``.
        """
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        conv_pool, state_pool = cache.conv[0], cache.temporal
        step = self._step
        constants = constants_of(layer)
        qkv = conv_decode(mixed_qkv, constants.taps, conv_pool, step.slots)
        q, k, v = normalise_qk(qkv, layer.num_k_heads)
        g = folded_gate(a, constants.rate, constants.shift, layer.lower_bound, layer.num_k_heads)
        beta = torch.sigmoid(b[0].float())
        o = kda_decode(q, k, v, g, beta, state_pool, step.slots)
        if step.snapshot_from is not None and step.snapshot_to is not None:
            conv_pool[step.snapshot_to] = conv_pool[step.snapshot_from]
            state_pool[step.snapshot_to] = state_pool[step.snapshot_from]
        return o.to(mixed_qkv.dtype).unsqueeze(0)

    def forward_extend(
        self, layer: Any, forward_batch: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """Several tokens per sequence, each sequence continuing from its slot.

        Args:
            mixed_qkv: [T, 3 * H * K] packed projections before the convolution.
            a: [1, T, H, K] raw forget gate. b: [1, T, H] raw beta.

        Returns:
            [1, T, H, V] in the dtype of ``mixed_qkv``.
        """
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        constants = constants_of(layer)
        g = folded_gate(a[0].flatten(-2), constants.rate, constants.shift, layer.lower_bound, layer.num_k_heads)
        beta = torch.sigmoid(b[0].float())
        output = mixed_qkv.new_zeros(mixed_qkv.shape[0], layer.num_v_heads, layer.head_v_dim)
        for sequence in self._step.sequences:
            rows = sequence.rows
            output[rows] = _extend_one(
                layer, sequence, mixed_qkv[rows], g[rows], beta[rows], cache.conv[0], cache.temporal
            ).to(output.dtype)
        return output.unsqueeze(0)


def check_conv_dtype(state: torch.dtype, activations: torch.dtype) -> None:
    """Convolution states must hold activations exactly, or a prefix hit continues from other numbers than a cold run.

    Raises:
        ValueError: they would be rounded.
    """
    if torch.promote_types(state, activations) != state:
        raise ValueError(
            f"convolution states are {state}, activations {activations}: a prefix hit would be rounded; name the dtype "
            "(--dtype), or set SGLANG_MAMBA_CONV_DTYPE to it"
        )


@dataclass(frozen=True)
class Constants:
    """Values derived from a layer's weights, in the layout the CPU kernels read."""

    taps: torch.Tensor
    """[4, 3 * H * K] fp32 convolution taps."""
    rate: torch.Tensor
    shift: torch.Tensor
    """[H * K] fp32 each, see :func:`k3_sglang.kernels.kda.fold_gate`."""


def constants_of(layer: Any) -> Constants:
    """Constants of a RadixLinearAttention, derived on first use and kept until its weights change."""
    if layer.cpu_constants is None:
        rate, shift = fold_gate(layer.A_log, layer.dt_bias, layer.lower_bound)
        layer.cpu_constants = Constants(layer.conv_weights.float().t().contiguous(), rate, shift)
    return layer.cpu_constants


def _extend_one(
    layer: Any,
    sequence: Sequence,
    mixed_qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
) -> torch.Tensor:
    """Prefill one sequence, write its final state to its slot and its snapshot, if any, to the snapshot's slot.

    Returns:
        [T, H, V] float32.
    """
    slot = sequence.slot
    window = conv_pool[slot] if sequence.has_state else torch.zeros_like(conv_pool[slot])
    state = state_pool[slot].float() if sequence.has_state else torch.zeros_like(state_pool[slot], dtype=torch.float32)
    qkv, last_window = conv_prefill(mixed_qkv, constants_of(layer).taps, window)
    q, k, v = normalise_qk(qkv, layer.num_k_heads)
    cut, end = sequence.snapshot_len, sequence.extend_len
    outputs = []
    for part in (slice(0, cut), slice(cut, end)):
        if part.start == part.stop:
            continue
        o, state = kda_chunk(q[part], k[part], v[part], g[part], beta[part], state)
        outputs.append(o)
        if part.stop == cut:
            conv_pool[sequence.snapshot_slot] = mixed_qkv[cut - conv_pool.shape[1] : cut]
            state_pool[sequence.snapshot_slot] = state
    conv_pool[slot] = last_window
    state_pool[slot] = state
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
