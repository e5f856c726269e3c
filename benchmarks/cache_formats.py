"""What storing checkpoints as bfloat16 or int8 does to outputs, after 1 to 64 restores along one session.

    python benchmarks/cache_formats.py                      # no engine, a few minutes
    python benchmarks/cache_formats.py --model /path/to/checkpoint --turn 40 --json out.json

Every turn of the session starts from a stored state: the state at its end is written in the format and read again, all
layers, while the same tokens run beside it without. `bfloat16 pool` rounds after every token, as a pool of that type
(SGLang's `--mamba-ssm-dtype bfloat16`) does to running requests; `bfloat16 model` is no rounding of states at all but
weights and activations in bfloat16, as every deployment has them: the yardstick. Compared are all tokens of the turns
after so many restores: how often the most likely token is the same, the mean difference of its log-probability, and the
mean KL divergence in nats. The default, `tiny-random`, is untrained: it is far more sensitive than a trained model.

Below, one KDA layer of K3's head size with random inputs: relative error of its state and of its output. `slow` and
`fast` are the decay of its gates; errors die as fast as the state itself.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from k3_sglang.cache.formats import dequantize, quantize
from k3_sglang.kernels.kda import gate, kda_recurrent, l2norm
from k3_sglang.reference.attention import KDAState
from k3_sglang.reference.model import ReferenceModel, SequenceState
from k3_sglang.tiny.checkpoint import ensure

RESTORES = (1, 2, 4, 8, 16, 32, 64)
"""Figures are means over all turns with more restores than the last entry, up to this many."""

POOL, MODEL = "bfloat16 pool", "bfloat16 model"

Round = Callable[[Tensor], Tensor]
ROUND: dict[str, Round] = {
    "bfloat16": lambda state: state.bfloat16().float(),
    "int8": lambda state: dequantize(*quantize(state)),
    POOL: lambda state: state.bfloat16().float(),
}

HEADS, WIDTH, LAYER_TURN = 4, 128, 50
GATES = {"slow": (-9.0, -6.0), "mixed": (-9.0, 0.0), "fast": (-3.0, 1.0)}
"""Range of ``dt_bias``: a channel keeps its content for thousands of tokens, or for a few."""


@dataclass(frozen=True)
class Drift:
    """One format after so many restores."""

    format: str
    restores: int
    same_top: float
    mean_difference: float
    mean_kl: float


@dataclass(frozen=True)
class LayerDrift:
    """One format and one kind of gates after so many restores; relative errors."""

    format: str
    gates: str
    restores: int
    state: float
    output: float


def round_states(state: SequenceState, rounding: Round) -> None:
    """As if every recurrent state had been stored and restored."""
    for layer in state.layers:
        if isinstance(layer, KDAState):
            layer.recurrent = rounding(layer.recurrent)


def model_drift(directory: Path, turn_len: int, seed: int) -> list[Drift]:
    """Turns of random tokens through the model, exactly and with every format beside it."""
    model, coarse = ReferenceModel.from_dir(directory), ReferenceModel.from_dir(directory, torch.bfloat16)
    source = random.Random(seed)
    vocabulary = min(model.config.vocab_size, 1000)
    exact, states, coarse_state = model.new_state(), {name: model.new_state() for name in ROUND}, coarse.new_state()
    drifts: list[Drift] = []
    for restores in range(max(RESTORES) + 1):
        ids = source.choices(range(vocabulary), k=turn_len)
        truth = model(ids, exact).float().log_softmax(-1)
        drifts.append(compare(MODEL, restores, truth, coarse(ids, coarse_state).float().log_softmax(-1)))
        for name, state in states.items():
            found = run(model, ids, state, ROUND[name], every_token=name == POOL).log_softmax(-1)
            drifts.append(compare(name, restores, truth, found))
            round_states(state, ROUND[name])
    return drifts


def pooled(drifts: Sequence[Drift]) -> list[Drift]:
    """Means over the turns between two entries of :data:`RESTORES`."""
    means: list[Drift] = []
    for first, last in zip((0, *RESTORES), RESTORES, strict=False):
        for name in dict.fromkeys(drift.format for drift in drifts):
            own = [drift for drift in drifts if drift.format == name and first < drift.restores <= last]
            figures = [(drift.same_top, drift.mean_difference, drift.mean_kl) for drift in own]
            means.append(Drift(name, last, *(statistics.fmean(column) for column in zip(*figures, strict=True))))
    return means


def run(model: ReferenceModel, ids: list[int], state: SequenceState, rounding: Round, *, every_token: bool) -> Tensor:
    """Logits [T, vocab] in float32."""
    if not every_token:
        return model(ids, state).float()
    rows = []
    for token in ids:
        rows.append(model([token], state).float())
        round_states(state, rounding)
    return torch.cat(rows)


def compare(name: str, restores: int, truth: Tensor, found: Tensor) -> Drift:
    """Figures of one turn from log-probabilities [T, vocab]."""
    top = truth.argmax(-1, keepdim=True)
    same = (found.argmax(-1, keepdim=True) == top).float().mean()
    difference = (found.gather(-1, top) - truth.gather(-1, top)).abs().mean()
    kl = (truth.exp() * (truth - found)).sum(-1).mean()
    return Drift(name, restores, float(same), float(difference), float(kl))


def layer_drift(gates: str, seed: int) -> list[LayerDrift]:
    """The recurrence of one layer alone."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    bias = torch.empty(HEADS * WIDTH).uniform_(*GATES[gates], generator=generator)
    exact = torch.zeros(HEADS, WIDTH, WIDTH)
    states = {name: exact.clone() for name in ROUND if name != POOL}
    drifts: list[LayerDrift] = []
    for restores in range(max(RESTORES) + 1):
        shape = (LAYER_TURN, HEADS, WIDTH)
        q, k, v = l2norm(normal(*shape)) * WIDTH**-0.5, l2norm(normal(*shape) + 0.5), normal(*shape)
        log_decay = gate(normal(LAYER_TURN, HEADS * WIDTH) / 2, torch.zeros(HEADS), bias, -5.0)
        beta = torch.sigmoid(normal(LAYER_TURN, HEADS))
        truth, exact = kda_recurrent(q, k, v, log_decay, beta, exact)
        for name, stored in states.items():
            output, state = kda_recurrent(q, k, v, log_decay, beta, stored)
            if restores in RESTORES:
                errors = relative(state, exact), relative(output, truth)
                drifts.append(LayerDrift(name, gates, restores, *errors))
            states[name] = ROUND[name](state)
    return drifts


def relative(found: Tensor, truth: Tensor) -> float:
    """Norm of the error over the norm."""
    return float((found - truth).norm() / truth.norm())


def show(drifts: Sequence[Drift], layers: Sequence[LayerDrift]) -> None:
    """Print both tables."""
    table = Table(title="model: same most likely token / mean difference of its log-probability / mean KL")
    table.add_column("restores up to", justify="right")
    names = (*ROUND, MODEL)
    for name in names:
        table.add_column(name, justify="right")
    for restores in RESTORES:
        row = {drift.format: drift for drift in drifts if drift.restores == restores}
        cells = [f"{row[n].same_top:.0%} / {row[n].mean_difference:.2f} / {row[n].mean_kl:.3f}" for n in names]
        table.add_row(str(restores), *cells)
    Console(width=120).print(table)
    table = Table(title=f"one KDA layer, {HEADS} heads of {WIDTH}: relative error of state / of output")
    table.add_column("gates, format")
    for restores in RESTORES:
        table.add_column(str(restores), justify="right")
    for gates, name in dict.fromkeys((drift.gates, drift.format) for drift in layers):
        row = [drift for drift in layers if (drift.gates, drift.format) == (gates, name)]
        table.add_row(f"{gates}, {name}", *(f"{drift.state:.0e}/{drift.output:.0e}" for drift in row))
    Console(width=120).print(table)


def main() -> int:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint; default: `tiny-random`")
    parser.add_argument("--turn", type=int, default=24, help="tokens between two restores (default: 24)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    drifts = pooled(model_drift(arguments.model or ensure(), arguments.turn, arguments.seed))
    layers = [drift for gates in GATES for drift in layer_drift(gates, arguments.seed)]
    show(drifts, layers)
    if arguments.json:
        result = {"model": [asdict(drift) for drift in drifts], "layer": [asdict(drift) for drift in layers]}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
