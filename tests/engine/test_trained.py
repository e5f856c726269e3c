"""The trained tiny model through the whole stack: what it has learnt, with and without a prefix cache."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k3_sglang.tiny.evaluate.command import evaluate
from k3_sglang.tiny.evaluate.outcome import report
from tests.engine.conftest import two_free_ports
from tests.engine.stack import Stack, running

pytestmark = pytest.mark.timeout(900)

NO_CACHE = "cache: sglang\nengine:\n  disable-radix-cache: true\n"
GREEDY = ["copy", "tools", "files", "review", "resumed"]


@pytest.fixture(scope="module")
def trained(repository: Path) -> Iterator[Stack]:
    """Engine and gateway as `make serve` starts them."""
    with running(["--config", str(repository / "configs" / "tiny.yaml")], *two_free_ports()) as started:
        yield started


def figures(stack: Stack, skills: list[str], count: int) -> dict[str, Any]:
    """What the evaluation reports of held-out cases; a case that the endpoint failed fails the test."""
    options = Namespace(endpoint=f"{stack.gateway_url}/v1", skills=skills, count=count, seed=1, concurrency=2)
    cases = asyncio.run(evaluate(options))
    assert [case.problem for group in cases.values() for case in group if not case.verdicts] == []
    return report({}, cases)


def rate(found: dict[str, Any], measure: str) -> float:
    """Share of the cases that were right."""
    return float(found["measures"][measure]["rate"])


def test_a_fact_of_earlier_thinking_is_known_exactly_while_the_thinking_is_there(trained: Stack) -> None:
    found = figures(trained, ["facts"], 10)
    assert rate(found, "facts, thinking kept: all") >= 0.8
    assert rate(found, "facts, thinking put back: all") == rate(found, "facts, thinking kept: all")
    assert rate(found, "facts, thinking dropped: all") <= 0.3
    assert rate(found, "facts, thinking foreign: all") <= 0.3


def test_the_agent_repairs_programs_it_has_never_seen(trained: Stack) -> None:
    assert rate(figures(trained, ["coding"], 6), "coding: bug fixed") >= 0.5


def test_greedy_answers_are_the_same_without_a_prefix_cache(trained: Stack, repository: Path, tmp_path: Path) -> None:
    """Also that calls are right: a wrong state would show in arguments that are copied from far back."""
    cached = figures(trained, GREEDY, 8)
    assert rate(cached, "tools: call") >= 0.8
    config = tmp_path / "plain.yaml"
    config.write_text((repository / "configs" / "tiny.yaml").read_text(encoding="utf-8") + NO_CACHE, encoding="utf-8")
    with running(["--config", str(config)], *two_free_ports()) as plain:
        assert figures(plain, GREEDY, 8)["greedy_sha256"] == cached["greedy_sha256"]
