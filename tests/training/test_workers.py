"""Training shared by several processes: the same model as one process trains, stopped and saved together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from k3_sglang.tiny.__main__ import main
from k3_sglang.tiny.train.data import Item
from k3_sglang.tiny.train.plan import Plan, Stage
from k3_sglang.tiny.train.run import CHECKPOINT_FILE, LOG_FILE
from k3_sglang.tiny.train.workers import Workers, run_together

PLAN = Plan(
    (Stage("a", 1200, 64),), source="copy", step_tokens=400, batch_tokens=256, warmup_steps=2, quantise_from=0.5
)


def command(directory: Path, plan: Plan, workers: int) -> list[str]:
    """Arguments of a run."""
    place = directory.parent / f"{directory.name}-plan"
    place.mkdir()
    plan.save(place)
    numbers = ["--workers", str(workers), "--no-fusion"]
    return ["train", "--out", str(directory), "--plan", str(place / "plan.json"), *numbers]


@pytest.mark.timeout(300)
def test_two_workers_train_the_model_that_one_trains(tmp_path: Path) -> None:
    for count in (1, 2):
        assert main(command(tmp_path / str(count), PLAN, count)) == 0
    states = [torch.load(tmp_path / str(count) / CHECKPOINT_FILE, weights_only=True) for count in (1, 2)]
    assert states[0]["position"] == states[1]["position"]
    begun = {name: value for name, value in states[0]["parameters"].items() if not name.endswith("bias")}
    for name, value in begun.items():
        torch.testing.assert_close(states[1]["parameters"][name], value, rtol=0, atol=2e-3, msg=name)
    rows = [
        [json.loads(line) for line in (tmp_path / str(count) / LOG_FILE).read_text().splitlines()] for count in (1, 2)
    ]
    assert len(rows[0]) == len(rows[1]) >= 3
    for alone, shared in zip(*rows, strict=True):
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-3)
        assert shared["norm"] == pytest.approx(alone["norm"], rel=1e-2)
        assert (shared["tokens"], shared["rounded"]) == (alone["tokens"], alone["rounded"])


@pytest.mark.timeout(300)
def test_an_interrupt_stops_both_workers_and_the_run_can_go_on(tmp_path: Path) -> None:
    long = replace(PLAN, stages=(Stage("a", 10**6, 64),))
    arguments = command(tmp_path / "run", long, 2)
    process = subprocess.Popen(
        [sys.executable, "-m", "k3_sglang.tiny", *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    log = tmp_path / "run" / LOG_FILE
    deadline = time.monotonic() + 200
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0 and "not finished" in output
    assert _gone(process.pid)
    before = torch.load(tmp_path / "run" / CHECKPOINT_FILE, weights_only=True)["position"]["tokens"]
    assert 0 < before < 10**6
    again = ["train", "--out", str(tmp_path / "run"), "--resume", "--workers", "2", "--no-fusion", "--time-limit", "0"]
    assert main(again) == 0
    assert torch.load(tmp_path / "run" / CHECKPOINT_FILE, weights_only=True)["position"]["tokens"] > before


def _gone(group: int) -> bool:
    """Whether every process of a group has ended, some seconds later at most."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def _fail(workers: Workers, rank: int) -> None:
    workers.gather(0)
    if workers.rank == rank:
        raise ArithmeticError(f"worker {rank}")
    workers.gather(1)


@pytest.mark.timeout(120)
def test_a_worker_that_fails_ends_the_run() -> None:
    with pytest.raises(ChildProcessError, match="worker 1 of 2 ended with code 1.*--resume"):
        run_together(_fail, 1, 2)
    with pytest.raises(ArithmeticError, match="worker 0"):
        run_together(_fail, 0, 2)
    with pytest.raises(ValueError, match="0 workers; at least 1"):
        run_together(_fail, 0, 0)


def test_shares_hold_every_conversation_once_and_are_of_like_size() -> None:
    items: list[Item] = [(tuple(range(size)), (0.0,) * size, "a") for size in (900, 500, 400, 300, 200, 100)]
    shares: list[list[Item]] = []
    for rank in range(2):
        worker = Workers()
        worker.rank, worker.count = rank, 2
        shares.append(worker.share(items))
    assert sorted(len(item[0]) for share in shares for item in share) == [100, 200, 300, 400, 500, 900]
    assert [sum(len(item[0]) for item in share) for share in shares] == [1200, 1200]
