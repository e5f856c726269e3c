"""Conversations for training: grouped into steps, padded to rectangles.

A step's content depends on the plan alone: stage, number of its first conversation, tokens per step. So a resumed run
sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from k3_sglang.tiny.train.plan import Plan

Item: TypeAlias = tuple[tuple[int, ...], tuple[float, ...], str]
"""A conversation: ids, loss weight of each id as a target, skill."""

_ROUND: Final = 32
"""Lengths of batches are multiples of this: KDA's chunk."""


@dataclass(frozen=True)
class Position:
    """Where a run stands in its data."""

    tokens: int = 0
    """Tokens trained on."""
    stage: int = 0
    index: int = 0
    """Number of the stage's next conversation."""


@dataclass(frozen=True)
class Step:
    """The conversations of one optimiser step and where the data go on after it."""

    items: tuple[Item, ...]
    after: Position


def steps(plan: Plan, position: Position) -> Iterator[Step]:
    """All steps from a position to the plan's end. Making them takes 1 % of the time that training on them does."""
    while position.stage < len(plan.stages):
        stream = _open(plan, position)
        number = position.stage
        while position.stage == number:
            items: list[Item] = []
            size = 0
            while size < (plan.stages[number].step_tokens or plan.step_tokens):
                items.append(next(stream))
                size += len(items[-1][0])
            tokens = position.tokens + size
            later = max(number, plan.stage_at(tokens))
            position = Position(tokens, later, position.index + len(items) if later == number else 0)
            yield Step(tuple(items), position)


def _open(plan: Plan, position: Position) -> Iterator[Item]:
    stage = plan.stages[position.stage]
    if plan.source == "copy":
        from k3_sglang.tiny.train import synthetic

        return synthetic.samples(plan.seed, stage.mix, stage.max_len, position.index)
    if plan.source == "world":
        from k3_sglang.tiny.data.stream import samples

        made = samples(plan.seed, "train", stage.mix, stage.max_len, start=position.index)
        return ((sample.ids, sample.weights, sample.skill) for sample in made)
    raise ValueError(f"source is {plan.source!r}; allowed: 'world', 'copy'")


@dataclass(frozen=True)
class Batch:
    """Conversations of similar length in a rectangle."""

    ids: Tensor
    """[B, T] int64, padded at the right with 0."""
    weights: Tensor
    """[B, T] float32: loss weight of the *next* id, zero for the last one and padding."""
    skills: tuple[str, ...]
    """[B]."""


def batches(items: Sequence[Item], batch_tokens: int) -> list[Batch]:
    """Sort by length and cut into rectangles of at most ``batch_tokens`` (or one conversation)."""
    result: list[Batch] = []
    group: list[Item] = []
    for item in sorted(items, key=lambda item: len(item[0]), reverse=True):
        longest = _padded(len(group[0][0])) if group else 0
        if group and longest * (len(group) + 1) > batch_tokens:
            result.append(_batch(group))
            group = []
        group.append(item)
    if group:
        result.append(_batch(group))
    return result


def _padded(length: int) -> int:
    return -(-length // _ROUND) * _ROUND


def _batch(group: Sequence[Item]) -> Batch:
    length = _padded(len(group[0][0]))
    ids, weights = torch.zeros(len(group), length, dtype=torch.int64), torch.zeros(len(group), length)
    for row, (tokens, targets, _) in enumerate(group):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        weights[row, : len(tokens) - 1] = torch.tensor(targets[1:])
    return Batch(ids, weights, tuple(skill for _, _, skill in group))
