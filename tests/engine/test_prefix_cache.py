"""A prefix hit restores keys, values and recurrent state so exactly that greedy tokens equal those of a cold run."""

from __future__ import annotations

import random

import pytest

from tests.engine.stack import Engine

VOCABULARY = 1792
"""Ids below the control tokens of the tiny model."""

NEW_TOKENS_PER_TURN = 24


def prompt(length: int, seed: int) -> list[int]:
    """Random ordinary token ids."""
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def three_turns(engine: Engine, length: int, *, cold: bool) -> list[tuple[tuple[int, ...], int, int]]:
    """Prompt, answer, more text, answer, more text, answer; with ``cold`` the cache is emptied before each turn."""
    turns = []
    ids = prompt(length, seed=length)
    for turn in range(3):
        if cold:
            engine.flush()
        answer = engine.generate(ids, NEW_TOKENS_PER_TURN)
        turns.append((answer.ids, answer.cached_tokens, len(ids)))
        ids = ids + list(answer.ids) + prompt(length // 2 + 7, seed=1000 * length + turn)
    return turns


@pytest.mark.parametrize("length", [1, 2, 3, 5, 63, 64, 65, 66, 67, 127, 128, 129, 130, 191, 300, 1000, 2049])
def test_three_turn_sessions_give_the_same_greedy_tokens_cached_and_cold(engine: Engine, length: int) -> None:
    cold = three_turns(engine, length, cold=True)
    assert [cached for _, cached, _ in cold] == [0, 0, 0]
    engine.flush()
    warm = three_turns(engine, length, cold=False)
    assert [ids for ids, _, _ in warm] == [ids for ids, _, _ in cold]
    for turn in (1, 2):  # all of the turn before but the last token of its answer, which was never computed
        assert warm[turn][1] == warm[turn - 1][2] + NEW_TOKENS_PER_TURN - 1


def test_a_second_identical_prompt_reuses_its_prefix(engine: Engine) -> None:
    ids = prompt(300, seed=1)
    first, second, third = engine.generate(ids), engine.generate(ids), engine.generate(ids)
    # A state at the prompt's end is one token too far; the second request leaves one before its last token.
    assert [answer.cached_tokens for answer in (first, second, third)] == [0, 0, 299]
    assert first.ids == second.ids == third.ids


@pytest.mark.parametrize("shared", [70, 128, 200])
def test_branches_of_one_prefix_do_not_disturb_each_other_or_the_checkpoint(engine: Engine, shared: int) -> None:
    head = prompt(shared, seed=shared)
    branches = [head + prompt(40 + 13 * i, seed=50 + i) for i in range(4)]
    cold = []
    for branch in branches:
        engine.flush()
        cold.append(engine.generate(branch, 32).ids)
    engine.flush()
    for _ in range(3):  # the first pass fills the cache, the next two hit what it left
        assert [engine.generate(branch, 32).ids for branch in branches] == cold


def test_a_prompt_longer_than_a_prefill_chunk_equals_itself_after_a_hit(engine: Engine) -> None:
    ids = prompt(5000, seed=9)  # the configuration computes at most 2,048 tokens in one step
    first = engine.generate(ids, 24)
    second = engine.generate(ids, 24)
    assert second.cached_tokens > 2048
    assert first.ids == second.ids


def test_the_three_tokens_after_a_restore_come_from_the_right_convolution_window(engine: Engine) -> None:
    head = prompt(128, seed=77)
    for tail_len in (1, 2, 3, 4):
        ids = head + prompt(tail_len, seed=tail_len)
        engine.flush()
        cold = engine.generate(ids, 8).ids
        engine.flush()
        engine.generate(head + [5], 1)
        warm = engine.generate(ids, 8)
        assert warm.cached_tokens == 128
        assert warm.ids == cold
