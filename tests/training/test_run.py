"""The training loop: learning, steps of data, and a resumed run that equals an uninterrupted one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from k3_sglang.config import TextConfig
from k3_sglang.tiny.train.data import Item, Position, batches, steps
from k3_sglang.tiny.train.optimiser import balance_router, orthogonalise
from k3_sglang.tiny.train.plan import PLAN_FILE, Plan, Stage
from k3_sglang.tiny.train.run import LOG_FILE, Trainer, text_config, train

PLAN = Plan(
    (Stage("a", 700, 64), Stage("b", 900, 96)),
    source="copy",
    step_tokens=256,
    batch_tokens=256,
    warmup_steps=2,
    quantise_from=0.5,
)


@pytest.fixture(scope="module")
def small() -> TextConfig:
    """One layer of each kind, the first with the dense MLP."""
    text = text_config()
    moe = replace(text.moe, num_experts=4, experts_per_token=2, intermediate_size=32, latent_size=32)
    return replace(text, num_layers=3, layer_kinds=("kda", "mla", "kda"), moe=moe, attn_res_block_size=2)


def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(small: TextConfig, tmp_path: Path) -> None:
    whole, first, second = (Trainer(PLAN, small) for _ in range(3))
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    assert train(whole, tmp_path / "whole")
    for _ in range(2):
        assert not train(first, tmp_path / "parts", time_limit=0)  # one step, then saved
    assert first.optimiser.steps == 2
    second.restore(tmp_path / "parts")
    assert train(second, tmp_path / "parts")
    assert second.position == whole.position
    assert all(torch.equal(value, whole.parameters[name]) for name, value in second.parameters.items())
    logs = [(tmp_path / name / LOG_FILE).read_text().splitlines() for name in ("whole", "parts")]
    rows = [[{**json.loads(line), "seconds": 0} for line in log] for log in logs]
    assert rows[0] == rows[1] and rows[0][0]["stage"] == 0 and rows[0][-1]["rounded"]


def test_a_few_steps_on_the_same_conversations_learn_them(small: TextConfig) -> None:
    trainer = Trainer(replace(PLAN, learning_rate=1e-2, quantise_from=0.0), small)
    step = next(steps(PLAN, Position()))
    losses = [trainer.step(step)["loss"] for _ in range(12)]
    assert losses[0] > 6 and losses[-1] < losses[0] - 2


def test_steps_from_a_position_go_on_where_the_stream_was() -> None:
    everything = list(steps(PLAN, Position()))
    later = list(steps(PLAN, everything[1].after))
    assert later == everything[2:]
    assert everything[-1].after.stage == len(PLAN.stages)
    assert {step.after.stage for step in everything} == {0, 1, 2}


def test_batches_hold_every_conversation_once_with_its_next_ids_weights() -> None:
    items: list[Item] = [
        ((1, 2, 3), (0.0, 0.5, 1.0), "a"),
        (tuple(range(40)), (0.0,) + (0.25,) * 39, "b"),
        ((7, 8), (0.0, 1.0), "a"),
    ]
    made = batches(items, 64)
    assert [batch.ids.shape for batch in made] == [(1, 64), (2, 32)]
    assert made[0].skills == ("b",) and float(made[0].weights.sum()) == 0.25 * 39
    assert made[1].ids[0, :4].tolist() == [1, 2, 3, 0]
    assert made[1].weights[:, :3].tolist() == [[0.5, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_the_worlds_conversations_are_a_source() -> None:
    plan = replace(PLAN, source="world", stages=(Stage("copy", 5000, 384),), step_tokens=1000)
    first, second = islice(steps(plan, Position()), 2)
    assert next(steps(plan, first.after)) == second
    assert sum(len(item[0]) for item in first.items) >= 1000


def test_the_learning_rate_rises_stays_and_falls() -> None:
    plan = replace(PLAN, learning_rate=1.0, warmup_steps=4, decay_fraction=0.5, final_rate=0.1)
    assert plan.rate_at(0, 0) == 0.25 and plan.rate_at(3, 100) == 1.0 and plan.rate_at(9, 800) == 1.0
    assert plan.rate_at(9, 1200) == pytest.approx(0.55) and plan.rate_at(9, 1600) == pytest.approx(0.1)


def test_a_stage_may_have_steps_of_another_size_and_another_rate() -> None:
    plan = replace(PLAN, stages=(Stage("a", 700, 64), Stage("b", 900, 96, step_tokens=512, rate=2.0)), warmup_steps=1)
    sizes: dict[int, list[int]] = {0: [], 1: []}
    stage = 0
    for step in steps(plan, Position()):
        sizes[stage].append(sum(len(item[0]) for item in step.items))
        stage = step.after.stage
    assert 256 <= min(sizes[0]) < 512 <= min(sizes[1])
    assert plan.rate_at(9, 800) == 2 * plan.rate_at(9, 600) and plan.rate_at(9, 1600) > 0


def test_a_plan_survives_its_file_and_unknown_settings_are_refused(tmp_path: Path) -> None:
    PLAN.save(tmp_path)
    assert Plan.load(tmp_path / PLAN_FILE) == PLAN
    raw = json.loads((tmp_path / PLAN_FILE).read_text()) | {"momentum": 1}
    (tmp_path / PLAN_FILE).write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="momentum"):
        Plan.load(tmp_path / PLAN_FILE)


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.6 and values.max() < 1.3


def test_the_bias_moves_toward_experts_that_got_less() -> None:
    bias = torch.zeros(4)
    balance_router(bias, [10, 2, 4, 0], 0.1)
    assert bias[0] < bias[2] and bias[1] > 0 and bias[3] > 0
    assert float(bias.sum()) == pytest.approx(0, abs=1e-6)
