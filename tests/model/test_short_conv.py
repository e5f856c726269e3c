"""The short convolution agrees with a grouped conv1d, whole, cut anywhere and one token at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from k3_sglang.kernels.short_conv import conv_decode, conv_prefill, stack_taps

CHANNELS = 3 * 40


def weights() -> list[Tensor]:
    """Conv weights of q, k and v in the release's layout."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(CHANNELS // 3, 1, 4, generator=generator) for _ in range(3)]


def by_conv1d(history: Tensor, x: Tensor) -> Tensor:
    """The same through torch's convolution: history [3, D], x [T, D] -> [T, D]."""
    padded = torch.cat((history, x)).t().unsqueeze(0)
    return F.silu(F.conv1d(padded, torch.cat(weights()), groups=CHANNELS))[0].t()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 64, 129])
def test_prefill_equals_conv1d_and_leaves_the_last_three_inputs(length: int) -> None:
    history, x = torch.randn(3, CHANNELS), torch.randn(length, CHANNELS)
    before = history.clone()
    output, state = conv_prefill(x, stack_taps(*weights()), history)
    torch.testing.assert_close(output, by_conv1d(history, x))
    assert torch.equal(state, torch.cat((history, x))[-3:])
    assert torch.equal(history, before)


def test_the_last_tap_multiplies_the_current_token() -> None:
    taps = torch.zeros(4, CHANNELS)
    taps[3] = 1
    x = torch.randn(5, CHANNELS)
    output, _ = conv_prefill(x, taps, torch.zeros(3, CHANNELS))
    torch.testing.assert_close(output, F.silu(x))


@settings(max_examples=25, deadline=None)
@given(length=st.integers(2, 40), cut=st.integers(1, 39), batch=st.integers(1, 4))
def test_prefill_then_decode_equals_prefill_of_everything(length: int, cut: int, batch: int) -> None:
    cut = min(cut, length - 1)
    taps = stack_taps(*weights())
    x = torch.randn(batch, length, CHANNELS)
    pool = torch.full((9, 3, CHANNELS), float("nan"))
    slots = torch.randperm(9)[:batch]
    outputs = []
    for row in range(batch):
        output, pool[slots[row]] = conv_prefill(x[row, :cut], taps, torch.zeros(3, CHANNELS))
        outputs.append(output)
    steps = [conv_decode(x[:, t], taps, pool, slots) for t in range(cut, length)]
    for row in range(batch):
        expected, state = conv_prefill(x[row], taps, torch.zeros(3, CHANNELS))
        torch.testing.assert_close(torch.cat((outputs[row], torch.stack([s[row] for s in steps]))), expected)
        assert torch.equal(pool[slots[row]], state)
    assert pool[[slot for slot in range(9) if slot not in slots.tolist()]].isnan().all()


def test_sums_are_float32_and_rounded_once_for_bfloat16_inputs() -> None:
    history, x = torch.randn(3, CHANNELS).bfloat16(), torch.randn(20, CHANNELS).bfloat16()
    taps = stack_taps(*weights())
    output, state = conv_prefill(x, taps, history)
    exact, _ = conv_prefill(x.float(), taps, history.float())
    assert state.dtype == output.dtype == torch.bfloat16
    assert torch.equal(output, exact.bfloat16())
    pool = history[None].clone()
    assert torch.equal(conv_decode(x[:1], taps, pool, torch.tensor([0])), exact[:1].bfloat16())


def test_the_returned_state_does_not_alias_the_input() -> None:
    x = torch.randn(6, CHANNELS)
    _, state = conv_prefill(x, stack_taps(*weights()), torch.zeros(3, CHANNELS))
    kept = state.clone()
    x.zero_()
    assert torch.equal(state, kept)
