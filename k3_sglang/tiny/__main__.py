"""Command line of the tiny models: ``python -m k3_sglang.tiny build|path|eval|train|export``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from k3_sglang.config import K3Config
from k3_sglang.costs import total_parameters
from k3_sglang.tiny import build, ensure
from k3_sglang.tiny.evaluate.command import add_arguments, run
from k3_sglang.tiny.train.command import add_commands, export_command, train_command
from k3_sglang.tiny.trained import trained


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m k3_sglang.tiny",
        description="Kimi K3 of three million parameters, in the release's checkpoint layout: a trained one that is "
        "part of the package, and one with random weights that is built.",
        epilog="The launcher serves them as `--model tiny` and `--model tiny-random`.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("build", help="write a checkpoint with random weights to a directory")
    command.description = "Write config, weights (3 shards), index, vocabulary, tokenizer and image files."
    command.add_argument("directory", type=Path, metavar="DIR", help="created when missing; must be empty")
    command.add_argument("--seed", type=int, default=0, help="one seed always gives the same bytes (default: 0)")
    command.add_argument("--force", action="store_true", help="overwrite a checkpoint that is already in DIR")
    path = commands.add_parser("path", help="print where the trained checkpoint lies")
    path.description = (
        "The directory of the launcher's model, for example for `python -m k3_sglang.chat tokens --vocabulary`."
    )
    path.add_argument("--random", action="store_true", help="that of the untrained model, building it when missing")
    add_arguments(commands.add_parser("eval", help="success of a served tiny K3 on held-out cases, skill by skill"))
    add_commands(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (2: the directory cannot be used)."""
    options = _parser().parse_args(arguments)
    if options.command == "eval":
        return run(options)
    try:
        if options.command == "path":
            print(ensure() if options.random else trained())
            return 0
        if options.command == "train":
            return train_command(options)
        if options.command == "export":
            return export_command(options)
        directory = build(options.directory, options.seed, force=options.force)
    except (OSError, ValueError) as error:
        print(f"k3_sglang.tiny: {error}", file=sys.stderr)
        return 2
    text = K3Config.from_dir(directory).text
    size = sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
    print(
        f"{directory}: {text.num_layers} layers, {total_parameters(text) / 1e6:.2f} M parameters, "
        f"{size / 1e6:.1f} MB, seed {options.seed}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
