"""Whole distributions over the vocabulary out of a running engine, through SGLang's ``/generate``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import torch
from torch import Tensor

IDLE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Scores:
    """One request's log-probabilities."""

    prompt: Tensor
    """[n, vocab] float64: row j is the distribution after prompt position ``first + j``, up to the last position."""
    first: int
    """Prompt position of row 0."""
    output: Tensor
    """[new tokens, vocab] float64: row j is what token j of the output was chosen from."""
    output_ids: tuple[int, ...]
    cached_tokens: int


class ScoredEngine:
    """Requests whose answers carry the log-probability of every token of the vocabulary."""

    def __init__(self, http: httpx.Client, vocab_size: int) -> None:
        """``http`` has SGLang's own server (not the gateway) as its base address."""
        self._http = http
        self._vocabulary = list(range(vocab_size))

    def flush(self) -> None:
        """Empty the prefix cache; SGLang refuses while a request is not yet fully accounted for.

        Raises:
            TimeoutError: the engine never became idle.
        """
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while self._http.post("/flush_cache").status_code != httpx.codes.OK:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine was not idle for {IDLE_TIMEOUT_S:.0f} s: does another client use it?")
            time.sleep(0.05)

    def run(self, ids: Sequence[int]) -> None:
        """Compute a prompt and leave it in the prefix cache."""
        self._generate({"input_ids": list(ids)}, new_tokens=1)

    def score(self, ids: Sequence[int], *, first: int = 0, new_tokens: int = 1) -> Scores:
        """Distributions after prompt positions ``first`` and later, and those of a greedy continuation.

        SGLang takes at most ``first`` tokens from its prefix cache, so 0 forces a cold run.
        """
        asked = {"return_logprob": True, "logprob_start_len": first, "token_ids_logprob": self._vocabulary}
        body = self._generate({"input_ids": list(ids), **asked}, new_tokens)
        meta = body["meta_info"]
        output = self._rows(meta["output_token_ids_logprobs"])
        # The first entry belongs to the token at `first` itself, whose distribution was not asked for.
        prompt = self._rows(entry for entry in meta["input_token_ids_logprobs"] if entry is not None)
        return Scores(
            prompt=torch.cat((prompt, output[:1])),
            first=first,
            output=output,
            output_ids=tuple(body["output_ids"]),
            cached_tokens=meta["cached_tokens"],
        )

    def _generate(self, request: dict[str, Any], new_tokens: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        return self._http.post("/generate", json={**request, "sampling_params": sampling}).raise_for_status().json()

    def _rows(self, entries: Iterable[list[tuple[float, int, None]]]) -> Tensor:
        rows = [[value for value, _, _ in entry] for entry in entries]
        return torch.tensor(rows, dtype=torch.float64).view(len(rows), len(self._vocabulary))
