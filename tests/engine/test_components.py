"""What the engine computes inside the model and keeps in its pools, tensor by tensor, against the released reference.

The golden engine records its forward passes while a folder exists (see ``k3_sglang/debug_dump.py``).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from k3_sglang.parity.components import (
    KINDS,
    Pass,
    compare_components,
    engine_values,
    golden_values,
    read_passes,
    reference_values,
    vision_component,
)
from k3_sglang.parity.golden import Golden
from tests.engine.stack import Engine

Recorder = Callable[[Sequence[int], int], list[Pass]]


@pytest.fixture(scope="module")
def data(golden: Path) -> Golden:
    """Golden prompts and values."""
    return Golden(golden)


@pytest.fixture
def record(golden_engine: Engine, golden_dump_dir: Path) -> Iterator[Recorder]:
    """Run a prompt greedily and return the engine's forward passes."""
    yield from recorder(golden_engine, golden_dump_dir)


@pytest.fixture
def record_chunks(chunked_engine: Engine, chunked_dump_dir: Path) -> Iterator[Recorder]:
    """The same with SGLang's cache and prompts cut into chunks."""
    yield from recorder(chunked_engine, chunked_dump_dir)


def recorder(engine: Engine, folder: Path) -> Iterator[Recorder]:
    """What records an engine's passes into its folder, which goes when it is no longer needed."""

    def run(ids: Sequence[int], new_tokens: int) -> list[Pass]:
        engine.wait_idle()
        folder.mkdir()
        engine.generate(ids, new_tokens)
        passes = read_passes(folder)
        shutil.rmtree(folder)
        return passes

    yield run
    shutil.rmtree(folder, ignore_errors=True)


def test_a_prefill_computes_and_keeps_what_the_reference_does(
    golden_engine: Engine, data: Golden, record: Recorder
) -> None:
    golden_engine.flush()
    (recorded,) = record(data.prompt("len64").ids, 1)
    assert (recorded.mode, recorded.prefix_lens, recorded.seq_lens) == ("EXTEND", (0,), (64,))
    components = list(compare_components(engine_values(recorded), golden_values(data)))
    assert [component for component in components if not component.passed] == []
    assert len(components) == len(KINDS) + 2  # routing: choices and weights
    assert sum(component.tensors for component in components) == 9 * 3 + 1 + 6 * 2 + 3 + 8 * 2


def test_a_state_kept_inside_a_prefill_is_the_state_at_that_token(
    chunked_engine: Engine, data: Golden, record_chunks: Recorder
) -> None:
    """SGLang's cache asks the backend for it; ours cuts the prefill instead."""
    chunked_engine.flush()
    ids = data.prompt("len200").ids
    recorded, _ = record_chunks(ids[:150], 1)
    assert recorded.snapshot_lens == (64,)
    wanted = {name: value for name, value in reference_values(data, ids[:64]).items() if ".kda_" in name}
    kept = {name.removeprefix("snapshot.0."): value for name, value in recorded.values.items()}
    components = list(compare_components(kept, wanted))
    assert [component.passed for component in components][:2] == [True, True]
    assert [component.tensors for component in components][:2] == [6, 6]


def test_a_prefix_hit_and_the_steps_after_it_go_on_from_the_right_state(
    golden_engine: Engine, data: Golden, record: Recorder
) -> None:
    golden_engine.flush()
    prompt = data.prompt("len200")
    golden_engine.generate(prompt.ids[:130], 1)
    prefill, *steps = record(prompt.ids, 4)
    assert prefill.prefix_lens == (130,)
    assert [step.mode for step in steps] == ["DECODE"] * 3
    assert [step.seq_lens for step in steps] == [(201,), (202,), (203,)]
    tokens = prompt.ids + prompt.greedy
    for recorded in (prefill, *steps):
        start, end = recorded.prefix_lens[0], recorded.seq_lens[0]
        wanted = reference_values(data, tokens[start:end], state_ids=tokens[:start])
        # The reference traces latents of new tokens only; the engine's cache must hold all of them.
        whole = reference_values(data, tokens[:end])
        wanted |= {name: value for name, value in whole.items() if name.endswith(".mla_latent")}
        components = list(compare_components(engine_values(recorded), wanted))
        assert [component for component in components if not component.passed] == []


def test_vision_features_equal_the_reference(data: Golden) -> None:
    component = vision_component(data)
    assert component.tensors == 3
    assert component.passed, component
