"""Packed against unpacked routed experts on a CPU, through the engine: memory, decode and prefill speed, as ratios.

    python benchmarks/expert_formats.py                      # writes a 0.7 GB checkpoint first, about four minutes
    python benchmarks/expert_formats.py --model tiny

Both engines run one after the other in this run, each with its own warm-up; compare nothing between runs.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import asdict
from pathlib import Path

import httpx
from engine_cpu import Figure, decode_rate, figure, prefill_rate
from loading_memory import FP32_BYTES, PACKED_BYTES
from rich.console import Console
from rich.table import Table
from servers import launched
from synthetic_checkpoint import write

from k3_sglang import tiny
from k3_sglang.config import K3Config, TextConfig
from k3_sglang.costs import expert_parameters

FORMATS = ("packed", "unpacked")
REPETITIONS = 3
PREFILL_TOKENS = 1024


def experts_gb(text: TextConfig, experts: str) -> float:
    """Memory of all routed experts."""
    layers = text.num_layers - text.num_dense_layers
    values = layers * text.moe.num_experts * expert_parameters(text)
    return values * (PACKED_BYTES if experts == "packed" else FP32_BYTES) / 1e9


def measure(checkpoint: Path, experts: str) -> list[Figure]:
    """Speeds of one engine."""
    arguments = ["--model", str(checkpoint), "--device", "cpu", "--dtype", "float32", "--experts", experts]
    arguments += ["--kv-tokens", "16384", "--state-slots", "64", "--constrain", "off"]
    source = random.Random(0)
    samples: dict[str, list[float]] = {}
    with (
        launched(arguments) as server,
        httpx.Client(base_url=server.engine_url, timeout=600, trust_env=False) as engine,
    ):
        for repetition in range(REPETITIONS + 1):
            taken = {
                "decode, batch 1": decode_rate(engine, 1, source),
                "decode, batch 8": decode_rate(engine, 8, source),
                f"prefill, {PREFILL_TOKENS} tokens": prefill_rate(engine, PREFILL_TOKENS, source),
            }
            if repetition:  # the first round warms up
                for name, value in taken.items():
                    samples.setdefault(name, []).append(value)
            engine.post("/flush_cache").raise_for_status()
    return [figure(name, "tokens/s", values) for name, values in samples.items()]


def show(text: TextConfig, figures: dict[str, list[Figure]]) -> None:
    """Print the table."""
    size = f"{expert_parameters(text) / 1e6:.2f} M values"
    table = Table(title=f"{text.moe.num_experts} routed experts a layer, each of {size}, float32")
    for column in ("figure", *FORMATS, "packed / unpacked"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    memory = [experts_gb(text, experts) for experts in FORMATS]
    table.add_row("memory of experts, GB", *(f"{size:.3f}" for size in memory), f"{memory[0] / memory[1]:.3f}")
    for packed, unpacked in zip(*(figures[experts] for experts in FORMATS), strict=True):
        ratio = packed.value / unpacked.value
        table.add_row(f"{packed.name}, {packed.unit}", f"{packed.value:.1f}", f"{unpacked.value:.1f}", f"{ratio:.2f}")
    Console().print(table)


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="`tiny` or a checkpoint; default: a random one (takes a quarter of an hour)")
    parser.add_argument("--experts", type=int, default=96, help="routed experts per layer of the random checkpoint")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model is None:
            checkpoint = write(Path(folder) / "synthetic", arguments.experts)
        else:
            checkpoint = tiny.ensure() if arguments.model == "tiny" else Path(arguments.model)
        text = K3Config.from_dir(checkpoint).text
        figures = {experts: measure(checkpoint, experts) for experts in FORMATS}
    show(text, figures)
    spread = max(row.highest / row.lowest for rows in figures.values() for row in rows)
    print(f"{REPETITIONS} repetitions; largest spread of one figure: {spread:.2f} x")
    if arguments.json:
        plain = {experts: [asdict(row) for row in rows] for experts, rows in figures.items()}
        arguments.json.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
