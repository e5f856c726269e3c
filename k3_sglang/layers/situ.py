"""SiTU-GLU, K3's bounded activation (technical report eq. 12; ``hidden_act: situ``)."""

from __future__ import annotations

import torch

from k3_sglang.config import SituConfig


def situ_glu(gate_up: torch.Tensor, situ: SituConfig) -> torch.Tensor:
    """``[b tanh(g/b) sigmoid(g)] * [l tanh(u/l)]`` in fp32 with one final cast; |result| <= b * l.

    Args:
        gate_up: [..., 2 * I], the gate half first, each half already rounded to the model dtype by its GEMM.
        situ: the two constants b = ``activation_situ_beta`` and l = ``activation_situ_linear_beta``.

    Returns:
        [..., I] in the dtype of ``gate_up``.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gated = (gate * (1 / situ.beta)).tanh_().mul_(torch.sigmoid(gate))
    bounded_up = (up * (1 / situ.linear_beta)).tanh_()
    return gated.mul_(bounded_up).mul_(situ.beta * situ.linear_beta).to(gate_up.dtype)
