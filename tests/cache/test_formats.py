"""Stored checkpoints: how far bfloat16 and int8 are from what was written, and what many restores add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3_sglang.cache.formats import (
    LARGEST,
    STORED_ENV,
    BFloat16Store,
    CheckpointPool,
    Int8Store,
    StateTensors,
    Store,
    StoredSettings,
    dequantize,
    quantize,
    refuse,
    stored_settings,
)
from k3_sglang.kernels.kda import gate, kda_recurrent, l2norm

LAYERS, SLOTS, SHAPE = 3, 5, (2, 8, 16)
CPU = torch.device("cpu")


def states(count: int, seed: int) -> Tensor:
    """[layers, count, heads, value, key], rows of very different size."""
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(LAYERS, count, *SHAPE, generator=generator)
    return plain * torch.logspace(-6, 3, SHAPE[1]).view(-1, 1)


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.floats(-30, 30))
def test_int8_is_within_half_a_step_of_every_row(seed: int, exponent: float) -> None:
    written = states(2, seed) * 2.0**exponent
    quantized, scale = quantize(written)
    assert quantized.dtype == torch.int8
    assert int(quantized.abs().max()) == LARGEST
    error = (dequantize(quantized, scale) - written).abs()
    assert bool((error <= scale * 0.501).all())


@settings(deadline=None)
@given(st.integers(0, 1 << 30))
def test_what_was_restored_is_stored_without_a_further_error(seed: int) -> None:
    once = dequantize(*quantize(states(2, seed)))
    twice = dequantize(*quantize(once))
    assert torch.allclose(twice, once, rtol=1e-6, atol=0)


def test_a_row_of_zeros_stays_zero() -> None:
    written = states(1, 0)
    written[:, :, :, 3] = 0
    restored = dequantize(*quantize(written))
    assert not bool(restored[:, :, :, 3].any())
    assert bool(torch.isfinite(restored).all())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_state_that_is_not_finite_is_an_error(wrong: float) -> None:
    written = states(1, 0)
    written[1, 0, 1, 2, 3] = wrong
    with pytest.raises(ValueError, match="not finite"):
        quantize(written)


@pytest.mark.parametrize(("kind", "error"), [(BFloat16Store, 2**-8), (Int8Store, 1 / LARGEST)])
def test_slots_keep_what_was_written_to_them_and_nothing_else(kind: type, error: float) -> None:
    store: Store = kind(LAYERS, SLOTS, SHAPE, CPU)
    first, second = states(2, 1), states(1, 2)
    store.write(torch.tensor([4, 1]), first)
    store.write(torch.tensor([2]), second)
    restored = store.read(torch.tensor([2, 1, 4]))
    assert restored.dtype == torch.float32
    largest = first.abs().amax(-1, keepdim=True)
    assert bool(((restored[:, [2, 1]] - first).abs() <= largest * error).all())
    assert bool(((restored[:, [0]] - second).abs() <= second.abs().amax(-1, keepdim=True) * error).all())
    assert not bool(store.read(torch.tensor([0, 3])).any())


class FreeSlots:
    """Slots 1 to 5."""

    def __init__(self) -> None:
        self.slots = list(range(1, SLOTS + 1))

    def alloc(self, need_size: int) -> Tensor | None:
        return torch.tensor([self.slots.pop() for _ in range(need_size)]) if need_size <= len(self.slots) else None

    def free(self, free_index: Tensor) -> None:
        self.slots += free_index.tolist()

    def available_size(self) -> int:
        return len(self.slots)

    def clear(self) -> None:
        self.slots = list(range(1, SLOTS + 1))


@dataclass
class RunningStates:
    temporal: Tensor
    conv: Sequence[Tensor]


@dataclass
class RunningPool:
    mamba_cache: StateTensors


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_what_a_kept_slot_holds_is_shown_and_not_the_running_slot_of_the_same_number(form: str) -> None:
    running = RunningPool(RunningStates(states(8, 5), [torch.randn(LAYERS, 8, 4, 3)]))
    pool = CheckpointPool(form, SLOTS, running, FreeSlots())
    kept = pool.alloc()
    assert kept is not None
    pool.store_from_active(running, torch.tensor([7]), kept)
    written = running.mamba_cache.temporal[:, [7]].clone(), running.mamba_cache.conv[0][:, 7].clone()
    running.mamba_cache.temporal.zero_()
    running.mamba_cache.conv[0].zero_()
    window, state = pool.kept(int(kept))
    assert torch.equal(window, written[1])
    assert torch.allclose(state, written[0], rtol=0.01, atol=float(written[0].abs().max()) * 0.01)


def test_bytes_of_a_state() -> None:
    exact = LAYERS * 2 * 8 * 16 * 4
    assert BFloat16Store(LAYERS, SLOTS, SHAPE, CPU).bytes_per_slot == exact // 2
    assert Int8Store(LAYERS, SLOTS, SHAPE, CPU).bytes_per_slot == exact // 4 + LAYERS * 2 * 8 * 4


def test_errors_of_many_restores_do_not_add_up() -> None:
    """A layer of K3's head size whose state is stored and restored every 16 tokens, slow and fast gates mixed."""
    generator = torch.Generator().manual_seed(3)
    heads, width, turn = 2, 128, 16
    bias = torch.empty(heads * width).uniform_(-9, 0, generator=generator)
    exact = int8 = torch.zeros(heads, width, width)
    errors: list[float] = []
    for _ in range(64):
        q, k, v = (torch.randn(turn, heads, width, generator=generator) for _ in range(3))
        q, k = l2norm(q) * width**-0.5, l2norm(k)
        log_decay = gate(torch.zeros(turn, heads * width), torch.zeros(heads), bias, -5.0)
        beta = torch.sigmoid(torch.randn(turn, heads, generator=generator))
        _, exact = kda_recurrent(q, k, v, log_decay, beta, exact)
        _, int8 = kda_recurrent(q, k, v, log_decay, beta, int8)
        errors.append(float((int8 - exact).norm() / exact.norm()))
        int8 = dequantize(*quantize(int8))
    assert max(errors[1:]) < 0.02
    assert max(errors[48:]) < 1.2 * max(errors[16:48]), "the error still grows after 48 restores"


def test_format_and_size_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STORED_ENV, raising=False)
    assert stored_settings() is None
    monkeypatch.setenv(STORED_ENV, "int8:96")
    assert stored_settings() == StoredSettings("int8", 96)
    for wrong in ("int8", "int8:", "int8:0", "int8:-4", "int4:96", ":96", ""):
        monkeypatch.setenv(STORED_ENV, wrong)
        with pytest.raises(ValueError, match="a colon and a number of slots"):
            stored_settings()


@pytest.mark.parametrize("flag", ["enable_hierarchical_cache", "enable_unified_memory", "enable_int8_mamba_checkpoint"])
def test_what_cannot_read_a_second_pool_is_refused(flag: str) -> None:
    off = {"enable_unified_memory": False, "enable_int8_mamba_checkpoint": False}
    host_tier = flag == "enable_hierarchical_cache"
    given = SimpleNamespace(**(off if host_tier else {**off, flag: True}))
    refuse(SimpleNamespace(enable_hierarchical_cache=False, server_args=SimpleNamespace(**off)))
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')} is set"):
        refuse(SimpleNamespace(enable_hierarchical_cache=host_tier, server_args=given))
