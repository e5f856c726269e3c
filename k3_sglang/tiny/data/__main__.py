"""Command line of the training data: ``python -m k3_sglang.tiny.data show`` and ``vocabulary``."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from k3_sglang.tiny.data.stream import MIXES, SKILLS, samples, talk
from k3_sglang.tiny.data.vocabulary import BASE_TOKENS, tokenizer, train
from k3_sglang.tiny.vocabulary import dump

_CONVERSATIONS: Final = 6000


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m k3_sglang.tiny.data", description="Training data of the tiny K3.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="print conversations")
    lengths = commands.add_parser("lengths", help="print how long the conversations of each skill are, in tokens")
    for command in (show, lengths):
        command.add_argument("--mix", choices=sorted(MIXES), default="all")
        command.add_argument("--split", choices=("train", "held_out"), default="train")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--count", type=int, default=1 if command is show else 1000)
    show.add_argument("--start", type=int, default=0, help="number of the first conversation")
    vocabulary = commands.add_parser("vocabulary", help="train the vocabulary and write it in tiktoken.model format")
    vocabulary.add_argument("out", type=Path, metavar="OUT")
    vocabulary.add_argument("--base-tokens", type=int, default=BASE_TOKENS)
    return parser


def _show(options: argparse.Namespace) -> None:
    for made in islice(samples(options.seed, options.split, options.mix, 1 << 20, start=options.start), options.count):
        print(f"=== {made.skill}, {len(made.ids)} tokens\n{tokenizer().decode(made.ids)}\n")


def _lengths(options: argparse.Namespace) -> None:
    found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for made in islice(samples(options.seed, options.split, options.mix, 1 << 20), options.count):
        found[made.skill].append((len(made.ids), sum(weight == 1 for weight in made.weights)))
    print("skill        share  tokens: mean  shortest  longest  written by the assistant")
    for skill in SKILLS:
        if entries := sorted(found[skill]):
            mean, own = (sum(values) / len(entries) for values in zip(*entries, strict=True))
            share = len(entries) / options.count
            print(f"{skill:12} {share:5.1%} {mean:13.0f} {entries[0][0]:9} {entries[-1][0]:8} {own:9.0f}")


def _vocabulary(options: argparse.Namespace) -> None:
    talks = (talk(0, "train", "all", index) for index in range(_CONVERSATIONS))
    texts = (segment.text for made in talks for segment in made.texts() if not segment.allow_special)
    options.out.write_bytes(dump(train(texts, options.base_tokens)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    {"show": _show, "lengths": _lengths, "vocabulary": _vocabulary}[options.command](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
