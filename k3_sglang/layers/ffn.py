"""The dense SiTU-GLU MLP of layer 0 (``first_k_dense_replace``)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from k3_sglang.config import TextConfig
from k3_sglang.layers.parallel import Ranks, weight
from k3_sglang.layers.situ import situ_glu


class DenseMLP(torch.nn.Module):
    """``down(SiTU(gate(x), up(x)))``; the intermediate width is split over tensor-parallel ranks."""

    def __init__(self, config: TextConfig, ranks: Ranks) -> None:
        super().__init__()
        width = ranks.share(config.dense_intermediate_size, "intermediate_size")
        self.situ = config.situ
        self._ranks = ranks
        self.gate_up_proj = weight(2 * width, config.hidden_size)
        self.down_proj = weight(config.hidden_size, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] to [T, C]."""
        act = situ_glu(F.linear(x, self.gate_up_proj), self.situ)
        return self._ranks.all_reduce(F.linear(act, self.down_proj))
