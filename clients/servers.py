"""One engine with the gateway before it, its own OpenAI endpoints set up as its makers advise, both always stopped."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.servers import launched
from k3_sglang import tiny
from k3_sglang.tiny.trained import RANDOM, TRAINED, trained

REPOSITORY = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 900
ADDITIONS = """
engine:  # what SGLang's own endpoints need to part thinking and calls from content, and to tell cached tokens
  reasoning-parser: kimi_k3
  tool-call-parser: kimi_k3
  enable-cache-report: true
"""
SERVED_NAME = "kimi-k3"
"""Some clients decide by the name whether a model thinks, and keep or drop its thinking."""
CONTEXT_LEN = 131072
"""Room for the prompts of coding agents, which are long in the tiny model's vocabulary; K3 has no position encoding."""
KV_TOKENS = CONTEXT_LEN + 1024


@dataclass(frozen=True)
class Server:
    """A launch that is ready: both addresses without /v1, and the model's name at each."""

    gateway_url: str
    engine_url: str
    model: str
    engine_model: str


def widened(model: Path, folder: Path) -> Path:
    """A checkpoint like ``model`` (a directory, or the name of a tiny model) whose configuration allows long prompts.

    Its files are linked; the directory itself is returned when its context is long enough already.
    """
    named = {TRAINED: trained, RANDOM: tiny.ensure}
    source = named[str(model)]() if str(model) in named else model.resolve()
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    if text["max_position_embeddings"] >= CONTEXT_LEN:
        return source
    text["max_position_embeddings"] = CONTEXT_LEN
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


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
    arguments = ["--config", str(settings), "--kv-tokens", str(KV_TOKENS)]
    arguments += ["--model", str(widened(Path(model), log.parent / "checkpoint"))]
    arguments += ["--served-name", SERVED_NAME]
    if model == RANDOM:
        arguments += ["--constrain", "on"]  # its weights are random, which a directory does not tell
    with launched([*arguments, "--start-timeout-s", str(START_TIMEOUT_S)]) as server:
        try:
            yield running(server.gateway_url, server.engine_url)
        finally:
            log.write_text("\n".join(server.lines) + "\n", encoding="utf-8")
