"""Three ways to run an engine with the checkpoint cache and small pools, and what each of them can keep."""

from __future__ import annotations

from dataclasses import dataclass

from tests.engine.stack import Engine

KV_TOKENS = 6144
STATE_SLOTS = 18
CUT_COST_TOKENS = 32
"""The launcher's choice on a CPU."""
CHECK_ENV = "K3_SGLANG_CACHE_CHECK"
"""Index, tree and pools are compared whenever the engine is idle; a difference ends it."""


@dataclass(frozen=True)
class Mode:
    """One way to run the engine."""

    page_size: int
    overlap: str

    @property
    def configuration(self) -> str:
        """Launch settings."""
        return f"""
model: tiny-random
served_name: tiny
device: cpu
cache: k3
kv_tokens: {KV_TOKENS}
state_slots: {STATE_SLOTS}
max_running_requests: 4
page_size: {self.page_size}
overlap: "{self.overlap}"
chunked_prefill_tokens: 1024
log_level: warning
engine:
  schedule-conservativeness: 0.1  # admit requests without reserving room for their output: the pool runs full
"""

    def floor(self, length: int) -> int:
        """The last position at most ``length`` that a key can have."""
        return length // self.page_size * self.page_size

    def turn_end(self, prompt_len: int, new_tokens: int) -> int:
        """The deepest state that a turn leaves which ended at its token limit.

        The last token of an answer is sampled, never computed. A page that ends in the answer ends in a state; of a
        prompt that ends within a page, the last whole page does if the cut saves more than it costs.
        """
        end, prompt_end = self.floor(prompt_len + new_tokens - 1), self.floor(prompt_len)
        return end if end > prompt_end or end == prompt_len or prompt_end > 2 * CUT_COST_TOKENS else 0


MODES = {
    "pages of one token": Mode(1, "off"),
    "overlapped steps": Mode(1, "on"),
    "overlapped steps, pages of 64": Mode(64, "on"),
}


def cold(engine: Engine, ids: list[int], new_tokens: int) -> tuple[int, ...]:
    """What a request gives when nothing is cached."""
    engine.flush()
    answer = engine.generate(ids, new_tokens)
    assert answer.cached_tokens == 0
    return answer.ids
