"""What the cache benchmarks share: engines with one cache or the other, and streamed requests with scripted answers."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from servers import launched

VOCABULARY = 1792
"""Ordinary token ids of the tiny model."""

ANSWER_BIAS = 1e4
"""Added to a logit so that greedy decoding gives the scripted token, whatever the model thinks."""

FLUSH_TRIES = 200


@dataclass(frozen=True)
class Pools:
    """Memory and limits of an engine; the same for both caches."""

    kv_tokens: int
    state_slots: int
    max_running: int
    chunk_tokens: int = 2048
    page_size: int = 1
    further: Mapping[str, bool | int | float | str] = field(default_factory=dict[str, bool | int | float | str])
    """Flags of SGLang itself, by their long name without dashes."""
    overlap: str = "auto"

    def yaml(self, cache: str) -> str:
        """A configuration of the launcher for the tiny model."""
        lines = [
            "model: tiny-random",
            "served_name: tiny",
            "device: cpu",
            "log_level: warning",
            f"cache: {cache}",
            f"kv_tokens: {self.kv_tokens}",
            f"state_slots: {self.state_slots}",
            f"max_running_requests: {self.max_running}",
            f"chunked_prefill_tokens: {self.chunk_tokens}",
            f"page_size: {self.page_size}",
            f'overlap: "{self.overlap}"',
        ]
        if self.further:
            lines += ["engine:", *(f"  {name}: {value}" for name, value in self.further.items())]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Answer:
    """One finished request."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    """Seconds from sending the request to its first token."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return self.prompt_tokens - self.cached_tokens


class Engine:
    """SGLang's HTTP server behind a launch; may be used from several threads."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def answer(
        self, ids: Sequence[int], reply: Sequence[int], custom_params: Mapping[str, Any] | None = None
    ) -> Answer:
        """Send a prompt; the model answers ``reply``, which must be one token repeated.

        Raises:
            SystemExit: the engine refused or answered something else.
        """
        sampling = {
            "temperature": 0,
            "max_new_tokens": len(reply),
            "ignore_eos": True,
            "logit_bias": {str(reply[0]): ANSWER_BIAS},
            "custom_params": custom_params,
        }
        body = {"input_ids": list(ids), "sampling_params": sampling, "stream": True}
        sent, first, output, meta = time.perf_counter(), 0.0, [], {}
        with self.http.stream("POST", "/generate", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise SystemExit(f"the engine answered {response.status_code}: {response.read()[:300]!r}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - sent
                    event = json.loads(line.removeprefix("data: "))
                    output += event["output_ids"]
                    meta = event["meta_info"]
        if output != list(reply):
            raise SystemExit(f"the engine answered {output} where {list(reply)} was scripted")
        return Answer(meta["prompt_tokens"], meta["cached_tokens"], first)

    def flush(self) -> None:
        """Empty the prefix cache; SGLang refuses until the last request is fully accounted for.

        Raises:
            SystemExit: it never did.
        """
        for _ in range(FLUSH_TRIES):
            if self.http.post("/flush_cache").status_code == httpx.codes.OK:
                return
            time.sleep(0.05)
        raise SystemExit("the engine would not flush its cache: is another client using it?")


@contextlib.contextmanager
def engine(cache: str, pools: Pools) -> Iterator[Engine]:
    """A launch with the tiny model and this cache (``k3`` or ``sglang``), always stopped."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "launch.yaml"
        file.write_text(pools.yaml(cache), encoding="utf-8")
        limits = httpx.Limits(max_connections=None)
        with (
            launched(["--config", str(file)]) as server,
            httpx.Client(base_url=server.engine_url, timeout=600, trust_env=False, limits=limits) as http,
        ):
            yield Engine(http)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]
