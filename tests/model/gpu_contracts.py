"""Program run by test_gpu_contracts.py: our GPU path against SGLang's real classes, on a CPU. Prints facts as JSON.

SGLang is told that the machine has an NVIDIA GPU of a given generation while its layers are built; nothing is computed
by a GPU kernel. What is computed uses the layers' own plain PyTorch paths, or Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from k3_sglang.compat import KimiLinearConfig
from k3_sglang.config import K3Config
from tests.model.gpu_contracts_attention import kda_inputs, mla_forms, refused, stack_on_meta
from tests.model.gpu_contracts_experts import (
    loads_like_upstream,
    methods,
    native_difference,
    reload_keeps_the_layout,
    situ_kernel_difference,
)


def main(model_dir: Path) -> None:
    """Print every fact as one JSON object."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    raw = json.loads((model_dir / "config.json").read_text())
    config, text = K3Config.from_dict(raw).text, KimiLinearConfig(**raw["text_config"])
    facts = {
        "loads like upstream": {str(place): loads_like_upstream(place) for place in ((0, 1, 1), (1, 2, 1), (1, 2, 2))},
        "native difference": {str(size): native_difference(size) for size in (256, 192)},
        "reload": reload_keeps_the_layout(),
        "methods": methods(),
        "situ kernel": situ_kernel_difference(),
        "kda": kda_inputs(text, config),
        "mla": mla_forms(config),
        "refused": refused(),
        "stack": stack_on_meta(config),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
