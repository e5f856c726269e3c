"""The planner's pools against those the engine really has: those of `make serve`, and small ones in three modes."""

from __future__ import annotations

import re

import pytest

from k3_sglang import tiny
from k3_sglang.config import K3Config, TextConfig
from k3_sglang.launch.planner.layout import Layout
from k3_sglang.launch.planner.pools import Pools, PoolSettings, size_pools
from tests.engine import k3_cache
from tests.engine.k3_cache import Mode
from tests.engine.stack import Stack

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
WITHIN = 0.01
PLENTY_BYTES = 1 << 40


@pytest.fixture(scope="module")
def text() -> TextConfig:
    """The tiny model's dimensions."""
    return K3Config.from_dir(tiny.ensure()).text


def planned(text: TextConfig, settings: PoolSettings) -> Pools:
    pools = size_pools(text, Layout(), settings, PLENTY_BYTES)
    assert isinstance(pools, Pools)
    return pools


def amount(text: str) -> float:
    """A size of the launcher's table in bytes."""
    number, unit = text.split()
    return float(number) * UNITS[unit]


def agrees(stack: Stack, pools: Pools) -> None:
    """The table that the launcher prints from what the engine's processes announced."""
    table = "\n".join(stack.output)
    kv = re.search(r"KV pool +(\d+) tokens in pages of (\d+) \(([^)]+)\)", table)
    states = re.search(r"state pool +(\d+) slots \(([^)]+) each\)", table)
    running = re.search(r"running requests +(\d+)", table)
    assert kv and states and running, table
    assert (int(kv[1]), int(states[1]), int(running[1])) == (
        pools.kv_tokens,
        pools.state_slots,
        pools.max_running_requests,
    )
    assert amount(kv[3]) == pytest.approx(pools.kv_bytes, rel=WITHIN)
    assert amount(states[2]) == pytest.approx(pools.bytes_per_slot, rel=WITHIN)


def test_the_pools_of_make_serve_are_the_planned_ones(stack: Stack, text: TextConfig) -> None:
    settings = PoolSettings(
        context_len=65_534,
        kv_tokens=65_536,
        state_slots=128,
        max_running_requests=8,
        kv_dtype_bytes=4,
        conv_dtype_bytes=4,
        overlap=False,
    )
    agrees(stack, planned(text, settings))


def test_small_pools_in_pages_are_the_planned_ones(k3_stack: Stack, mode: Mode, text: TextConfig) -> None:
    settings = PoolSettings(
        context_len=k3_cache.KV_TOKENS,
        kv_tokens=k3_cache.KV_TOKENS,
        state_slots=k3_cache.STATE_SLOTS,
        max_running_requests=4,
        page_size=mode.page_size,
        kv_dtype_bytes=4,
        conv_dtype_bytes=4,
        overlap=mode.overlap == "on",
    )
    agrees(k3_stack, planned(text, settings))
