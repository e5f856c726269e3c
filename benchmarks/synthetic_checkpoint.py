"""Write a K3 checkpoint of any size with random weights, in the release's layout and in several shards.

    python benchmarks/synthetic_checkpoint.py DIR --experts 96

The tiny model's builder gives the same bytes everywhere and is slow; this one is for sizes at which memory and speed
can be measured. Vocabulary and tokenizer are the tiny model's.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from k3_sglang.config import K3Config
from k3_sglang.loading.headers import INDEX_FILE
from k3_sglang.loading.inventory import BYTE_DTYPES, TensorSpec, expected_tensors
from k3_sglang.tiny.checkpoint import VOCABULARY
from k3_sglang.tiny.recipe import CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG

SHARD_BYTES = 128 << 20
SCALE_BYTE = 120
"""Packed values of up to 6 / 128."""

FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias")


def larger_config(experts: int) -> dict[str, Any]:
    """``config.json`` of 13 layers, 1,024 wide; an expert has 0.8 million values."""
    config = copy.deepcopy(CONFIG)
    full_attention = [4, 8, 12, 13]
    config["text_config"] |= {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 13,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "num_experts": experts,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 512,
        "routed_expert_hidden_size": 512,
    }
    config["text_config"]["linear_attn_config"] |= {
        "full_attn_layers": full_attention,
        "kda_layers": [layer for layer in range(1, 14) if layer not in full_attention],
        "head_dim": 64,
        "num_heads": 8,
    }
    return config


def random_tensor(name: str, spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Numbers of a size at which nothing overflows."""
    if spec.dtypes == BYTE_DTYPES:
        if name.endswith("scale"):
            return torch.full(spec.shape, SCALE_BYTE, dtype=torch.uint8)
        return torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=generator)
    if name.endswith(FLOAT32):
        return torch.rand(spec.shape, generator=generator)
    if name.endswith("norm.weight"):
        return torch.ones(spec.shape, dtype=torch.bfloat16)
    return (torch.randn(spec.shape, generator=generator) / spec.shape[-1] ** 0.5).bfloat16()


def shards(config: K3Config) -> Iterator[dict[str, torch.Tensor]]:
    """All tensors in the release's order, in parts of about :data:`SHARD_BYTES`."""
    generator = torch.Generator().manual_seed(0)
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, spec in expected_tensors(config).items():
        part[name] = random_tensor(name, spec, generator)
        size += part[name].nbytes
        if size >= SHARD_BYTES:
            yield part
            part, size = {}, 0
    if part:
        yield part


def write(directory: Path, experts: int) -> Path:
    """Write the checkpoint into a new or empty directory; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = larger_config(experts)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(shards(K3Config.from_dict(raw)), 1):
        file = f"model-{number:05d}.safetensors"
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    shutil.copyfile(VOCABULARY, directory / "tiktoken.model")
    contents = {
        "config.json": raw,
        "generation_config.json": GENERATION_CONFIG,
        "tokenizer_config.json": TOKENIZER_CONFIG,
        INDEX_FILE: {"metadata": {}, "weight_map": weight_map},
    }
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return directory


def size_bytes(directory: Path) -> int:
    """Bytes of its weight files."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def main() -> None:
    """Parse arguments and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--experts", type=int, default=96, help="routed experts per layer (default: 96, 0.8 GB in all)")
    arguments = parser.parse_args()
    written = write(arguments.directory, arguments.experts)
    print(f"{written}: {size_bytes(written) / 1e9:.2f} GB in {len(list(written.glob('*.safetensors')))} shards")


if __name__ == "__main__":
    main()
