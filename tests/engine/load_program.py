"""Program of test_broken_checkpoints.py: SGLang's loader and our model class, without a server.

Arguments are checkpoint directories; the last line of output is a JSON list, for each of them None or its error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class Config(SimpleNamespace):
    """``text_config`` as the model class reads it from a Hugging Face configuration."""

    def to_dict(self) -> dict[str, Any]:
        """All keys."""
        return vars(self)


def main() -> None:
    """Build one model, then load every directory into it."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    directories = sys.argv[1:]
    build: Any = ServerArgs  # its fields are added where a type checker does not look
    arguments = build(model_path=directories[0], device="cpu", dtype="float32", attention_backend="k3_cpu")
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    from k3_sglang.models.kimi_k3 import KimiK3ForConditionalGeneration

    raw = json.loads((Path(directories[0]) / "config.json").read_text())
    torch.set_default_dtype(torch.float32)
    model = KimiK3ForConditionalGeneration(SimpleNamespace(**{**raw, "text_config": Config(**raw["text_config"])}))
    loader = DefaultModelLoader(LoadConfig())
    messages: list[str | None] = []
    for directory in directories:
        try:
            model.load_weights(loader._get_weights_iterator(DefaultModelLoader.Source(directory, None)))
            messages.append(None)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    print(json.dumps(messages))


if __name__ == "__main__":
    main()
