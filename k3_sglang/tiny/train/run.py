"""The training loop: steps, progress, checkpoints that a later run resumes from."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor

from k3_sglang.config import K3Config, TextConfig
from k3_sglang.reference.checkpoint import load_weights
from k3_sglang.tiny.data.vocabulary import BASE_TOKENS
from k3_sglang.tiny.recipe import files_for
from k3_sglang.tiny.train.data import Batch, Position, Step, batches, steps
from k3_sglang.tiny.train.fake_quant import rounded_experts
from k3_sglang.tiny.train.initial import initial_parameters
from k3_sglang.tiny.train.model import TrainableModel
from k3_sglang.tiny.train.optimiser import Optimiser, balance_router
from k3_sglang.tiny.train.plan import Plan
from k3_sglang.tiny.train.workers import Workers

CHECKPOINT_FILE: Final = "checkpoint.pt"
LOG_FILE: Final = "log.jsonl"

_LOG = logging.getLogger(__name__)


def text_config() -> TextConfig:
    """Dimensions of the model that is trained: the recipe's, with the vocabulary of the training data."""
    return K3Config.from_dict(files_for(BASE_TOKENS).config).text


class Trainer:
    """Parameters, optimiser and position of one run."""

    def __init__(
        self, plan: Plan, text: TextConfig | None = None, workers: Workers | None = None, device: str = "cpu"
    ) -> None:
        """Begin a run.

        Args:
            text: other dimensions than the recipe's.
            workers: who shares the work (default: nobody).
            device: where parameters, moments and products are.
        """
        self.device = torch.device(device)
        self.plan, self.text, self.workers = plan, text or text_config(), workers or Workers()
        initial = initial_parameters(self.text, plan.seed)  # drawn on the CPU, so that every device begins alike
        parameters = {name: value.to(self.device) for name, value in initial.items()}
        for name, value in parameters.items():
            value.requires_grad_(not name.endswith("e_score_correction_bias"))
        self.model = TrainableModel(self.text, parameters, bf16=plan.bf16)
        self.parameters = parameters
        self.optimiser = Optimiser(parameters, plan.optimiser)
        self.position = Position()
        self.seconds = 0.0
        """Time spent training, over all sessions."""

    def step(self, step: Step) -> dict[str, Any]:
        """Train on one step's conversations; returns its row of the log."""
        rectangles = batches(self.workers.share(step.items), self.plan.batch_tokens)
        total = sum(sum(weights[1:]) for _, weights, _ in step.items)
        rounded = self.position.tokens >= self.plan.quantise_from * self.plan.tokens
        loads = {layer: torch.zeros(self.text.moe.num_experts) for layer in self._routed_layers()}
        found: list[tuple[str, float, float]] = []
        for batch in rectangles:
            losses = self._losses(batch, rounded, total)
            for layer, load in self.model.loads.items():
                loads[layer] += torch.tensor(load, dtype=torch.float32)
            found += zip(batch.skills, losses.tolist(), batch.weights.sum(1).tolist(), strict=True)
        self._add_up(list(loads.values()))
        rate = self.plan.rate_at(self.optimiser.steps, self.position.tokens)
        norm = self.optimiser.step(rate, self.plan.max_norm)
        for layer, load in loads.items():
            bias = self.parameters[f"model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias"]
            balance_router(bias, load.tolist(), self.plan.balance_rate * rate / self.plan.learning_rate)
        self.position = step.after
        heaviest = max((float(load.max() / load.mean()) for load in loads.values()), default=1.0)
        everything = [entry for part in self.workers.gather(found) for entry in part]
        skills = sorted({skill for skill, _, _ in everything})
        return {
            "step": self.optimiser.steps,
            "tokens": self.position.tokens,
            "stage": self.position.stage,
            "loss": _mean(everything),
            "skills": {skill: _mean([entry for entry in everything if entry[0] == skill]) for skill in skills},
            "norm": norm,
            "rate": rate,
            "heaviest_expert": heaviest,
            "rounded": rounded,
        }

    def _routed_layers(self) -> list[int]:
        """Numbers of the layers with a router."""
        names = (name.split(".") for name in self.parameters if name.endswith("e_score_correction_bias"))
        return [int(parts[2]) for parts in names]

    def _add_up(self, loads: list[Tensor]) -> None:
        """Let gradients and loads be those of all workers. One that had no conversation adds zeros."""
        if self.workers.count == 1:
            return
        for name in self.optimiser.moved:
            value = self.parameters[name]
            if value.grad is None:
                value.grad = torch.zeros_like(value)
        grads = [self.parameters[name].grad for name in self.optimiser.moved]
        self.workers.add([*(grad for grad in grads if grad is not None), *loads])

    def _losses(self, batch: Batch, rounded: bool, total: float) -> Tensor:
        """Add a batch's gradients; returns the weighted sum of losses per conversation, [B]."""
        experts = rounded_experts(self.parameters) if rounded else None
        ids, wanted = batch.ids.to(self.device), batch.weights.to(self.device)
        hidden = self.model.hidden(ids, experts)
        row, column = wanted.nonzero(as_tuple=True)
        targets, weights = ids[row, column + 1], wanted[row, column]
        logits = self.model.logits(hidden[row, column])
        normaliser = torch.logsumexp(logits, -1)
        losses = (normaliser - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)) * weights
        penalty = self.plan.z_loss * (normaliser.square() * weights).sum()
        ((losses.sum() + penalty) / total).backward()
        return torch.zeros(batch.ids.shape[0], device=self.device).index_add_(0, row, losses.detach())

    def save(self, directory: Path) -> None:
        """Write the checkpoint; an older one stays whole until the new one is. Only the first worker writes.

        Raises:
            RuntimeError: the workers' parameters differ.
        """
        self.workers.check_equal(list(self.parameters.values()))
        if self.workers.rank:
            return
        state = {
            "parameters": {name: value.detach() for name, value in self.parameters.items()},
            "optimiser": self.optimiser.state_dict(),
            "position": asdict(self.position),
            "seconds": self.seconds,
        }
        staging = directory / f".{CHECKPOINT_FILE}.new"
        torch.save(state, staging)
        staging.replace(directory / CHECKPOINT_FILE)

    def start_from(self, checkpoint: Path) -> None:
        """Take over the weights of an exported checkpoint, with a new optimiser: to train it further.

        Raises:
            ConfigError, ReferenceCheckpointError: it cannot be read.
            ValueError: it is one of another model.
        """
        config = K3Config.from_dir(checkpoint)
        self._take(load_weights(checkpoint, config, torch.float32), checkpoint)

    def _take(self, stored: Mapping[str, Tensor], source: Path) -> None:
        with torch.no_grad():
            for name, value in self.parameters.items():
                found = stored.get(name)
                if found is not None and name.endswith("A_log"):
                    found = found[: value.shape[0]]  # the release pads it
                if found is None or found.shape != value.shape:
                    raise ValueError(f"{source}: {name} is missing or of another shape; was the recipe changed?")
                value.copy_(found)

    def restore(self, directory: Path) -> None:
        """Go on from :meth:`save`.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: it is one of another model.
        """
        state = torch.load(directory / CHECKPOINT_FILE, map_location=self.device, weights_only=True)
        self._take(state["parameters"], directory)
        self.optimiser.load_state_dict(state["optimiser"])
        self.position, self.seconds = Position(**state["position"]), state["seconds"]


def _mean(entries: Sequence[tuple[str, float, float]]) -> float:
    """Loss per weight of (skill, loss, weight)."""
    return sum(loss for _, loss, _ in entries) / max(1e-9, sum(weight for _, _, weight in entries))


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Signals received so far: Ctrl-C and SIGTERM end the run after the current step."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(
    trainer: Trainer, directory: Path, *, time_limit: float = float("inf"), save_every: float = 180.0, report: int = 10
) -> bool:
    """Train until the plan's end, the time limit or a signal; a checkpoint is written in every case.

    Args:
        directory: the run's, existing; receives checkpoint and log.
        time_limit: seconds.
        save_every: seconds between checkpoints.
        report: steps between progress lines.

    Returns:
        Whether the plan is finished.
    """
    begun = saved = time.monotonic()
    tokens_before, seconds_before = trainer.position.tokens, trainer.seconds
    recent: list[dict[str, Any]] = []
    finished = trainer.position.stage >= len(trainer.plan.stages)
    log_file = Path(os.devnull if trainer.workers.rank else directory / LOG_FILE)
    with log_file.open("a", encoding="utf-8") as log, _stop_requests() as signals:
        for step in steps(trainer.plan, trainer.position):
            row = trainer.step(step)
            now = time.monotonic()
            trainer.seconds = seconds_before + now - begun
            row["seconds"] = round(trainer.seconds, 2)
            log.write(json.dumps(row) + "\n")
            recent.append(row)
            if len(recent) == report:
                speed = (trainer.position.tokens - tokens_before) / (now - begun)
                _LOG.info("%s", progress(recent, speed, trainer.plan.tokens))
                log.flush()
                recent.clear()
            wanted = trainer.workers.gather((now - saved >= save_every, bool(signals) or now - begun >= time_limit))
            if any(save for save, _ in wanted):
                trainer.save(directory)
                saved = now
            finished = trainer.position.stage >= len(trainer.plan.stages)
            if any(stop for _, stop in wanted):
                break
    trainer.save(directory)
    return finished


def progress(rows: list[dict[str, Any]], speed: float, tokens: int) -> str:
    """One line about the last steps."""
    skills = sorted({skill for row in rows for skill in row["skills"]})
    parts = []
    for skill in skills:
        values = [row["skills"][skill] for row in rows if skill in row["skills"]]
        parts.append(f"{skill} {sum(values) / len(values):.3f}")
    last = rows[-1]
    left = (tokens - last["tokens"]) / speed
    loss = sum(row["loss"] for row in rows) / len(rows)
    return (
        f"step {last['step']}  {last['tokens'] / 1e6:.2f} M tokens  loss {loss:.4f}  [{', '.join(parts)}]  "
        f"{speed:.0f} tokens/s  norm {last['norm']:.2f}  heaviest expert {last['heaviest_expert']:.1f}x  "
        f"rate {last['rate']:.1e}  left {left / 60:.0f} min"
    )
