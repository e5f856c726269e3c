"""What a cache may hold: state slots and KV tokens, and what both cost in bytes on one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from k3_sglang import costs
from k3_sglang.config import TextConfig


@dataclass(frozen=True)
class Budget:
    """Memory and granularity of one replay. Lengths in tokens, memory of one rank."""

    states: int
    """State slots in all, those of running requests included."""
    kv_tokens: int
    state_bytes: int
    kv_token_bytes: int
    grain: int = 64
    """Tokens per key of the tree: 1 is exact, 64 is as fine as the traces and much faster."""
    page: int = 1
    """Page of the KV pool in tokens; at most the grain counts as 1."""
    chunk: int = 16384
    """Longest prefill chunk."""

    @property
    def total_bytes(self) -> int:
        """Bytes of both pools together: what a cache with one shared pool may use."""
        return self.states * self.state_bytes + self.kv_tokens * self.kv_token_bytes

    def units(self, tokens: int) -> int:
        """Tokens in keys of the tree, at least 1."""
        return max(tokens // self.grain, 1)

    def with_states(self, states: int) -> Budget:
        """The same budget with other state slots."""
        return replace(self, states=states)


def rank_bytes(
    text: TextConfig, *, tp: int, state_dtype_bytes: int, kv_dtype_bytes: int, attention_dp: bool
) -> tuple[int, int]:
    """Bytes of one state and of one KV token on a rank.

    Tensor parallelism shards the state by heads and replicates the latent; with attention data parallelism neither is
    sharded.
    """
    state = costs.state_bytes_per_checkpoint(text, state_dtype_bytes)
    kv = costs.kv_bytes_per_token(text, kv_dtype_bytes)
    return (state if attention_dp else -(-state // tp)), kv
