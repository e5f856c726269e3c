"""How many CPU threads a forward pass uses: few tokens are cheaper on one thread than the cost of waking others."""

from __future__ import annotations

import os

import torch

SINGLE_THREAD_MAX_TOKENS = 32
"""Passes of up to this many tokens run on one thread: their operations take microseconds, a thread barrier more."""


class ThreadChoice:
    """Sets torch's intra-op threads for each forward pass; the maximum is what the process started with."""

    def __init__(self) -> None:
        self.max_threads = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
        self._current = torch.get_num_threads()

    def set_for(self, num_tokens: int) -> None:
        """Choose for a pass over ``num_tokens`` packed tokens."""
        wanted = 1 if num_tokens <= SINGLE_THREAD_MAX_TOKENS else self.max_threads
        if wanted != self._current:
            torch.set_num_threads(wanted)
            self._current = wanted
