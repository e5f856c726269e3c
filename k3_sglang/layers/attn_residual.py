"""Attention Residuals: each sub-layer reads a softmax mixture of frozen earlier streams and the running one.

Architecture facts (technical report section 2.2, ``attn_res_block_size``):

- ``bank``: the un-mixed stream entering layers 0, B, 2B, ... is frozen as a row; row 0 is the embedding.
- At a block start the running stream restarts: the old stream is not added to that layer's attention output.
- A mixture scores RAW rows by ``rsqrt(mean(v^2) + eps) * (v . w)`` with ``w = norm.weight * proj.weight``; the norm
  touches only the scores, never the rows that are summed. No bias, no sqrt(d).
- The bank is per-token activation memory of one forward pass; nothing of it is cached between passes.
"""

from __future__ import annotations

import torch

from k3_sglang.layers.parallel import weight


class ResidualBank:
    """Frozen rows and the running stream of one forward pass, as one [T, R, C] buffer whose last used row is live.

    The inverse root mean square of a frozen row is computed once, when it freezes.
    """

    def __init__(self, num_tokens: int, max_rows: int, like: torch.Tensor, eps: float) -> None:
        """Room for ``max_rows`` frozen rows and the live one.

        Args:
            num_tokens: T of this pass.
            max_rows: block starts in the model.
            like: [T, C] stream whose dtype, device and width the rows take.
            eps: ``rms_norm_eps``.
        """
        self._rows = like.new_empty(num_tokens, max_rows + 1, like.shape[-1])
        self._inverse_rms = torch.empty(num_tokens, max_rows + 1, dtype=torch.float32, device=like.device)
        self._eps = eps
        self._frozen = 0
        self._live: torch.Tensor | None = None
        """Stream that the live row holds; a block start freezes the stream it has just mixed."""

    @property
    def num_frozen(self) -> int:
        """Rows frozen so far."""
        return self._frozen

    @property
    def frozen(self) -> torch.Tensor:
        """Rows frozen so far [T, R, C], for the next pipeline stage."""
        return self._rows[:, : self._frozen]

    def inherit(self, rows: torch.Tensor) -> None:
        """Take over the rows [T, R, C] that earlier stages froze, in their order.

        Raises:
            ValueError: more rows than the model has block starts.
        """
        for row in rows.unbind(1):
            self.freeze(row)

    def freeze(self, stream: torch.Tensor) -> None:
        """Keep the un-mixed stream [T, C] entering a block as the next row.

        Raises:
            ValueError: more rows than the model has block starts.
        """
        if self._frozen + 1 >= self._rows.shape[1]:
            raise ValueError(f"the residual bank holds {self._rows.shape[1] - 1} rows and all are frozen already")
        self._write(stream)
        self._frozen += 1
        self._live = None

    def _write(self, stream: torch.Tensor) -> None:
        """Put [T, C] into the live row, unless it is there already."""
        if stream is self._live:
            return
        self._live = stream
        self._rows[:, self._frozen] = stream
        wide = stream.float()
        self._inverse_rms[:, self._frozen] = torch.rsqrt(wide.square().mean(-1).add_(self._eps))

    def mix(self, stream: torch.Tensor, score_weight: torch.Tensor) -> torch.Tensor:
        """Mixture of all frozen rows and the running stream.

        Args:
            stream: [T, C] running stream.
            score_weight: [C] fp32, ``norm.weight * proj.weight``.

        Returns:
            [T, C] in the stream's dtype.
        """
        self._write(stream)
        used = self._frozen + 1
        rows = self._rows[:, :used].float()  # [T, R, C]
        scores = torch.matmul(rows, score_weight) * self._inverse_rms[:, :used]  # [T, R]
        weights = torch.softmax(scores, dim=-1).unsqueeze(1)  # [T, 1, R]
        return torch.bmm(weights, rows).squeeze(1).to(stream.dtype)


class ResidualScore(torch.nn.Module):
    """The folded score vector of one mixture point (``*_res_norm.weight`` times ``*_res_proj.weight``), fp32 [C]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = weight(hidden_size, dtype=torch.float32)
