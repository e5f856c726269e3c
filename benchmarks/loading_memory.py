"""Memory that loading takes beyond the model: peak of the engine's process, packed and unpacked experts.

    python benchmarks/loading_memory.py                      # writes a 0.7 GB checkpoint first, about two minutes
    python benchmarks/loading_memory.py --model /path/to/K3  # any other checkpoint

The peak counts pages of checkpoint files that are mapped while they are copied from; the kernel can take these back at
any time. "Above the model" is the peak less what the process held before reading and less the model's own size.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from servers import launched
from synthetic_checkpoint import size_bytes, write

from k3_sglang.config import K3Config, TextConfig
from k3_sglang.costs import expert_parameters, total_parameters

MEMORY = re.compile(r"process memory ([\d.]+) GB before, ([\d.]+) GB at most")
FP32_BYTES = 4
PACKED_BYTES = 17 / 32
"""Per value: half a byte, and a scale byte for 32 of them."""


@dataclass(frozen=True)
class Measured:
    """One engine start; sizes in GB."""

    experts: str
    model: float
    before: float
    peak: float
    largest_shard: float

    @property
    def above_model(self) -> float:
        """What loading took in addition."""
        return self.peak - self.before - self.model

    @property
    def ratio(self) -> float:
        """Memory taken while loading, in model sizes."""
        return (self.peak - self.before) / self.model


def model_gb(text: TextConfig, experts: str) -> float:
    """Size of the loaded model in float32, with its experts packed or not."""
    routed = (text.num_layers - text.num_dense_layers) * text.moe.num_experts * expert_parameters(text)
    per_value = PACKED_BYTES if experts == "packed" else FP32_BYTES
    return ((total_parameters(text) - routed) * FP32_BYTES + routed * per_value) / 1e9


def measure(checkpoint: Path, experts: str) -> Measured:
    """Start an engine, read what it says about its memory, stop it."""
    arguments = ["--model", str(checkpoint), "--device", "cpu", "--dtype", "float32", "--experts", experts]
    arguments += ["--kv-tokens", "2048", "--state-slots", "8", "--constrain", "off", "--log-level", "info"]
    with launched(arguments) as server:
        found = MEMORY.search(server.line_with("read weights"))
    assert found is not None
    return Measured(
        experts,
        model_gb(K3Config.from_dir(checkpoint).text, experts),
        float(found[1]),
        float(found[2]),
        max(file.stat().st_size for file in checkpoint.glob("*.safetensors")) / 1e9,
    )


def show(rows: list[Measured], checkpoint_gb: float) -> None:
    """Print the table."""
    table = Table(title=f"loading a checkpoint of {checkpoint_gb:.2f} GB, float32, sizes in GB")
    for column in ("experts", "model", "process before", "process peak", "above the model", "largest shard", "ratio"):
        table.add_column(column, justify="left" if column == "experts" else "right")
    for row in rows:
        sizes = (row.model, row.before, row.peak, row.above_model, row.largest_shard)
        table.add_row(row.experts, *(f"{size:.2f}" for size in sizes), f"{row.ratio:.2f}")
    Console().print(table)


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; default: a random one, written for this run")
    parser.add_argument("--experts", type=int, default=96, help="routed experts per layer of the random checkpoint")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = arguments.model or write(Path(folder) / "synthetic", arguments.experts)
        rows = [measure(checkpoint, experts) for experts in ("packed", "unpacked")]
        show(rows, size_bytes(checkpoint) / 1e9)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
