"""One engine with the gateway before it, its own OpenAI endpoints set up as its makers advise, both always stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.servers import launched

REPOSITORY = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 900
ADDITIONS = """
engine:  # what SGLang's own endpoints need to part thinking and calls from content, and to tell cached tokens
  reasoning-parser: kimi_k3
  tool-call-parser: kimi_k3
  enable-cache-report: true
"""
KV_TOKENS = 131072
"""Room for the prompts of coding agents, which are long in the tiny model's vocabulary."""


@dataclass(frozen=True)
class Server:
    """A launch that is ready: both addresses without /v1, and the model's name at each."""

    gateway_url: str
    engine_url: str
    model: str
    engine_model: str


def running(gateway_url: str, engine_url: str) -> Server:
    """Two servers that somebody else has started.

    Raises:
        httpx.HTTPError: one of them does not answer.
    """
    return Server(gateway_url, engine_url, _model(gateway_url), _model(engine_url))


def _model(url: str) -> str:
    answer = httpx.get(f"{url}/v1/models", trust_env=False, timeout=60).raise_for_status()
    return str(answer.json()["data"][0]["id"])


@contextlib.contextmanager
def serving(model: str, log: Path) -> Iterator[Server]:
    """The launcher with ``configs/tiny.yaml``, for the tiny model or the checkpoint in a directory.

    Raises:
        SystemExit: it did not become ready; the message has the end of its log.
    """
    settings = log.with_suffix(".yaml")
    preset = (REPOSITORY / "configs" / "tiny.yaml").read_text(encoding="utf-8")
    settings.write_text(preset + ADDITIONS, encoding="utf-8")
    arguments = ["--config", str(settings), "--model", model, "--kv-tokens", str(KV_TOKENS)]
    with launched([*arguments, "--start-timeout-s", str(START_TIMEOUT_S)]) as server:
        try:
            yield running(server.gateway_url, server.engine_url)
        finally:
            log.write_text("\n".join(server.lines) + "\n", encoding="utf-8")
