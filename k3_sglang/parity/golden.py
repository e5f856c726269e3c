"""Golden data: a small checkpoint in the release's layout with values computed by the released reference code."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from k3_sglang.config import K3Config
from k3_sglang.reference.model import ReferenceModel

SUFFIX = {"float32": "fp32", "bfloat16": "bf16"}
LONG_PROMPT_TOKENS = 1000


@dataclass(frozen=True)
class Prompt:
    """A text prompt."""

    name: str
    ids: tuple[int, ...]
    greedy: tuple[int, ...]
    """The reference's most likely continuation in float32; empty for prompts of our own."""


class Golden:
    """The golden folder; its README describes every tensor."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not (self.directory / "expected" / "prompts.json").is_file():
            raise FileNotFoundError(
                f"{self.directory} has no expected/prompts.json; name the folder that holds checkpoint/ and expected/"
            )

    @property
    def checkpoint(self) -> Path:
        """The checkpoint's directory."""
        return self.directory / "checkpoint"

    @cached_property
    def config(self) -> K3Config:
        """Dimensions of the checkpoint."""
        return K3Config.from_dir(self.checkpoint)

    @cached_property
    def raw_prompts(self) -> dict[str, Any]:
        """``expected/prompts.json``."""
        return json.loads((self.directory / "expected" / "prompts.json").read_text(encoding="utf-8"))

    @cached_property
    def prompts(self) -> tuple[Prompt, ...]:
        """The text prompts, shortest first."""
        text = self.raw_prompts["text"]
        found = [Prompt(name, tuple(entry["ids"]), tuple(entry["greedy"])) for name, entry in text.items()]
        return tuple(sorted(found, key=lambda prompt: len(prompt.ids)))

    def prompt(self, name: str) -> Prompt:
        """One of :attr:`prompts`."""
        return next(prompt for prompt in self.prompts if prompt.name == name)

    @cached_property
    def long_prompt(self) -> Prompt:
        """Random ordinary ids, longer than the golden prompts; only our own reference model knows its values."""
        first_control_id = min(self.raw_prompts["token_ids"].values())
        ids = random.Random(0).choices(range(first_control_id), k=LONG_PROMPT_TOKENS)
        return Prompt(f"random{len(ids)}", tuple(ids), ())

    @cache  # noqa: B019 - a handful of objects per process
    def tensors(self, name: str) -> dict[str, Tensor]:
        """``expected/<name>.safetensors``."""
        return load_file(self.directory / "expected" / f"{name}.safetensors")

    def logits(self, prompt: Prompt, dtype: str) -> Tensor:
        """[T, vocab] logits at every position: golden, or our reference model's for a prompt of our own."""
        if prompt.greedy:
            return self.tensors("text_logits")[f"{prompt.name}.{SUFFIX[dtype]}"]
        return self.reference_logits(prompt.ids, dtype)

    @cache  # noqa: B019
    def reference_model(self, dtype: str) -> ReferenceModel:
        """Our reference model, which gives the golden values (a test shows it), on the golden checkpoint."""
        return ReferenceModel.from_dir(self.checkpoint, getattr(torch, dtype))

    @cache  # noqa: B019
    def reference_logits(self, ids: Sequence[int], dtype: str) -> Tensor:
        """[T, vocab] logits of our reference model; ``ids`` is a tuple."""
        return self.reference_model(dtype)(ids)
