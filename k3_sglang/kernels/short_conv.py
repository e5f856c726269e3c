"""Causal depthwise convolution of width 4 with SiLU over the q | k | v channels of a KDA layer.

The carried state is the last 3 inputs, before convolution and SiLU, oldest first: [3, D], time-major. The last tap
multiplies the current token. Sums are float32 whatever the input dtype; the result is rounded to it once.
Four multiply-adds are many times faster on CPUs than a grouped ``conv1d``.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

TAPS: Final = 4
"""Width of the convolution; a state holds one input less."""


def stack_taps(q_weight: Tensor, k_weight: Tensor, v_weight: Tensor) -> Tensor:
    """The release's three conv weights, each [D / 3, 1, 4], as the [4, D] float32 taps the functions here take."""
    weight = torch.cat((q_weight, k_weight, v_weight)).squeeze(1)
    return weight.float().t().contiguous()


def conv_prefill(x: Tensor, taps: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve one sequence.

    Args:
        x: [T, D] projections of the new tokens, T >= 0.
        taps: [4, D] float32.
        state: [3, D] inputs before the first new token, zeros at the start of a sequence; not modified.

    Returns:
        SiLU(conv) [T, D] in x's dtype, and the state [3, D] after the last token in the state's dtype.
    """
    length = x.shape[0]
    padded = torch.cat((state.to(x.dtype), x))
    window = padded.float()
    total = window[:length] * taps[0]
    for tap in range(1, TAPS):
        total.addcmul_(window[tap : tap + length], taps[tap])
    return F.silu(total, inplace=True).to(x.dtype), padded[length:].to(state.dtype, copy=True)


def conv_decode(x: Tensor, taps: Tensor, state_pool: Tensor, slots: Tensor) -> Tensor:
    """Convolve one token of each of B sequences whose states live in a pool.

    Args:
        x: [B, D] projections. taps: [4, D] float32.
        state_pool: [slots, 3, D]; rows ``slots`` move on by one token, no other row is touched.
        slots: [B] int64, all different.

    Returns:
        SiLU(conv) [B, D] in x's dtype.
    """
    state = state_pool.index_select(0, slots)
    window = torch.cat((state, x.unsqueeze(1).to(state.dtype)), 1)
    state_pool.index_copy_(0, slots, window[:, 1:])
    return F.silu((window * taps).sum(1), inplace=True).to(x.dtype)
