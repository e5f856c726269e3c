"""Commands ``train`` and ``export`` of ``python -m k3_sglang.tiny``."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3_sglang.tiny.train.plan import PLAN_FILE, Plan, Stage

if TYPE_CHECKING:
    from k3_sglang.tiny.train.workers import Workers

SHIPPED = Plan(
    (
        Stage("copy", 1_200_000, 512, step_tokens=2048),
        Stage("tools", 1_600_000, 1280, rate=1.4),
        Stage("agent", 14_200_000, 3072, rate=1.4),
    ),
    step_tokens=4096,
    learning_rate=4e-3,
    decay_fraction=0.6,
    final_rate=0.01,
    quantise_from=0.8,
)
"""The plan of the weights in the package."""


def add_commands(commands: Any) -> None:
    """Add both to an argument parser's subparsers."""
    train = commands.add_parser("train", help="train the model from scratch, or go on with a run")
    train.description = "Train on the CPU. Ctrl-C saves; --resume goes on with exactly the same data."
    train.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the run's directory: plan, checkpoint, log"
    )
    train.add_argument("--resume", action="store_true", help="go on with the run in DIR; the plan is the one in DIR")
    train.add_argument(
        "--start-from", type=Path, metavar="CHECKPOINT", help="begin with the weights of an exported checkpoint"
    )
    train.add_argument("--plan", type=Path, metavar="JSON", help="stages and settings (default: the shipped model's)")
    train.add_argument(
        "--workers", type=int, default=1, help="processes that share every step, one for each free core (default: 1)"
    )
    train.add_argument(
        "--device", default="auto", metavar="NAME", help="cpu, cuda, or auto: a GPU when there is one (default)"
    )
    train.add_argument("--threads", type=int, default=1, help="processor threads of each worker (default: 1)")
    train.add_argument(
        "--time-limit", type=float, default=float("inf"), metavar="MINUTES", help="stop and save by then"
    )
    train.add_argument("--no-fusion", action="store_true", help="do not compile pointwise operations")
    export = commands.add_parser("export", help="write a run's weights as a checkpoint that the engine serves")
    export.add_argument("run", type=Path, metavar="RUN", help="directory of a training run")
    export.add_argument("directory", type=Path, metavar="DIR", help="created when missing; must be empty")
    export.add_argument("--force", action="store_true", help="overwrite a checkpoint that is already in DIR")


def train_command(options: argparse.Namespace) -> int:
    """Run ``train``; returns the exit code."""
    from k3_sglang.tiny.train.run import CHECKPOINT_FILE
    from k3_sglang.tiny.train.workers import run_together

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    directory: Path = options.out
    exists = (directory / CHECKPOINT_FILE).exists()
    if exists and not options.resume:
        raise FileExistsError(f"{directory} holds a run; pass --resume to go on with it or choose another directory")
    if exists and options.start_from is not None:
        raise ValueError(f"--start-from is for a new run and {directory} holds one; leave out one of the two")
    options.device = _device(options)
    if not options.resume:
        plan = Plan.load(options.plan) if options.plan else SHIPPED
        directory.mkdir(parents=True, exist_ok=True)
        plan.save(directory)
    run_together(work, options, options.workers)
    return 0


def work(workers: Workers, options: argparse.Namespace) -> None:
    """What every worker does: train the run in ``options.out`` until its end, the time limit or a signal."""
    import torch

    from k3_sglang.tiny.train.fusion import enable_fusion
    from k3_sglang.tiny.train.run import CHECKPOINT_FILE, Trainer, train

    directory: Path = options.out
    torch.set_num_threads(options.threads)
    if not options.no_fusion:
        enable_fusion()
    trainer = Trainer(Plan.load(directory / PLAN_FILE), workers=workers, device=options.device)
    if (directory / CHECKPOINT_FILE).exists():
        trainer.restore(directory)
    elif options.start_from is not None:
        trainer.start_from(options.start_from)
    finished = train(trainer, directory, time_limit=options.time_limit * 60)
    if workers.rank == 0:
        print(f"{directory}: {trainer.position.tokens} tokens, {'finished' if finished else 'not finished'}")


def _device(options: argparse.Namespace) -> str:
    import torch

    name: str = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and options.workers == 1 else "cpu"
    if options.workers > 1 and name != "cpu":
        raise ValueError(f"--workers {options.workers} is for processors and the device is {name}; add --device cpu")
    return name


def export_command(options: argparse.Namespace) -> int:
    """Run ``export``; returns the exit code."""
    from k3_sglang.tiny.train.export import export

    directory = export(options.run, options.directory, force=options.force)
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{directory}: {size / 1e6:.1f} MB; serve it with python -m k3_sglang.launch --model {directory}")
    return 0
