"""The three forms of Kimi Delta Attention agree: recurrence in float64, chunkwise prefill, batched decode."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3_sglang.kernels.kda import (
    fold_gate,
    folded_gate,
    gate,
    kda_chunk,
    kda_decode,
    kda_recurrent,
    l2norm,
    normalise_qk,
)

HEADS, WIDTH = 4, 32
LENGTHS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 200, 1000]
GATES = ["typical", "closed", "open", "closed-or-open", "every-scale"]


def log_decays(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Log decays in [-5, 0]: drawn as the model makes them, or at the ends of the range."""
    draw = torch.rand(shape, generator=generator)
    if kind == "typical":
        return -5 * torch.sigmoid(6 * draw - 6)
    if kind == "closed":
        return torch.full(shape, -5.0)
    if kind == "open":
        return -1e-5 * draw
    if kind == "closed-or-open":
        return torch.where(draw < 0.5, -5.0, 0.0)
    return -5 * 10 ** (-6 * draw)


def inputs(length: int, kind: str = "typical", seed: int = 0, heads: int = HEADS, width: int = WIDTH) -> list[Tensor]:
    """q, k, v, g, beta and a nonzero entering state for one sequence, float32."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = normalise_qk(torch.randn(length, 3 * heads * width, generator=generator), heads)
    g = log_decays(kind, (length, heads, width), generator)
    beta = torch.rand(length, heads, generator=generator)
    return [q, k, v, g, beta, torch.randn(heads, width, width, generator=generator)]


def exact(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The recurrence in float64."""
    q, k, v, g, beta, state = (tensor.double() for tensor in tensors)
    return kda_recurrent(q, k, v, g, beta, state)


def assert_close(name: str, actual: Tensor, expected: Tensor, limit: float = 2e-6) -> None:
    """Largest difference relative to the largest value."""
    assert actual.shape == expected.shape
    error = ((actual.double() - expected).abs().max() / expected.abs().max()).item()
    assert error <= limit, f"{name}: largest relative difference {error:.2e}, allowed {limit:.0e}"


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_equal_the_recurrence_in_output_and_final_state(length: int, kind: str) -> None:
    tensors = inputs(length, kind, seed=length)
    output, state = kda_chunk(*tensors)
    expected_output, expected_state = exact(tensors)
    assert_close("output", output, expected_output)
    assert_close("state", state, expected_state)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 150),
    kind=st.sampled_from(GATES),
    seed=st.integers(0, 2**31),
    chunk_size=st.sampled_from([16, 32, 64, 128]),
    heads=st.integers(1, 3),
    width=st.sampled_from([8, 60, 128]),
)
def test_any_chunk_size_and_shape_equals_the_recurrence(
    length: int, kind: str, seed: int, chunk_size: int, heads: int, width: int
) -> None:
    tensors = inputs(length, kind, seed, heads, width)
    output, state = kda_chunk(*tensors, chunk_size=chunk_size)
    expected_output, expected_state = exact(tensors)
    assert_close("output", output, expected_output)
    assert_close("state", state, expected_state)


@settings(max_examples=20, deadline=None)
@given(length=st.integers(2, 140), cut=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_a_sequence_cut_anywhere_ends_in_the_same_state(length: int, cut: float, seed: int) -> None:
    tensors = inputs(length, seed=seed)
    at = min(length - 1, max(1, round(cut * length)))
    head, state = kda_chunk(*[t[:at] for t in tensors[:5]], state=tensors[5])
    tail, state = kda_chunk(*[t[at:] for t in tensors[:5]], state=state)
    expected_output, expected_state = exact(tensors)
    assert_close("output", torch.cat((head, tail)), expected_output)
    assert_close("state", state, expected_state)


def test_values_wider_than_keys_are_handled() -> None:
    q, k, _, g, beta, _ = inputs(70)
    v, state = torch.randn(70, HEADS, 48), torch.randn(HEADS, 48, WIDTH)
    tensors = [q, k, v, g, beta, state]
    output, final = kda_chunk(*tensors)
    expected_output, expected_state = exact(tensors)
    assert_close("output", output, expected_output)
    assert_close("state", final, expected_state)


def test_the_entering_state_is_not_modified() -> None:
    tensors = inputs(100)
    before = tensors[5].clone()
    kda_chunk(*tensors)
    kda_recurrent(*tensors)
    assert torch.equal(tensors[5], before)


def test_chunks_carry_gradients() -> None:
    tensors = [tensor.double().requires_grad_() for tensor in inputs(37, heads=1, width=8)]
    chunk, recurrent = kda_chunk(*tensors)[0], kda_recurrent(*tensors)[0]
    weight = torch.randn(37, 1, 8, dtype=torch.float64)
    for name, mine, expected in zip(
        ["q", "k", "v", "g", "beta", "state"],
        torch.autograd.grad((chunk * weight).sum(), tensors),
        torch.autograd.grad((recurrent * weight).sum(), tensors),
        strict=True,
    ):
        assert_close(f"gradient of {name}", mine, expected, 1e-5)


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_decode_moves_its_slots_as_the_recurrence_and_touches_no_other(batch: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    pool = torch.full((12, HEADS, WIDTH, WIDTH), float("nan"))
    slots = torch.randperm(12, generator=generator)[:batch]
    states = torch.randn(batch, HEADS, WIDTH, WIDTH, generator=generator)
    pool[slots] = states
    sequences = [inputs(6, "every-scale", seed) for seed in range(batch)]
    outputs = []
    for t in range(6):
        q, k, v, g, beta = (torch.stack([s[i][t] for s in sequences]) for i in range(5))
        outputs.append(kda_decode(q, k, v, g, beta, pool, slots))
    for row, sequence in enumerate(sequences):
        output, state = exact([*sequence[:5], states[row]])
        assert_close("output", torch.stack([o[row] for o in outputs]), output)
        assert_close("state", pool[slots[row]], state)
    untouched = [slot for slot in range(12) if slot not in slots.tolist()]
    assert pool[untouched].isnan().all()


def test_decode_keeps_the_dtype_of_a_half_precision_pool() -> None:
    q, k, v, g, beta, state = inputs(1)
    pool = state.bfloat16()[None].repeat(3, 1, 1, 1)
    output = kda_decode(q, k, v, g, beta, pool, torch.tensor([1]))
    expected_output, expected_state = exact([q, k, v, g, beta, state.bfloat16()])
    assert pool.dtype == torch.bfloat16
    assert_close("output", output, expected_output)
    assert_close("state", pool[1], expected_state, 4e-3)


def test_gate_follows_its_definition_per_head_and_channel() -> None:
    a_log, dt_bias, z = torch.tensor([0.0, 0.7]), torch.arange(6) / 3, torch.randn(5, 6)
    g = gate(z, a_log, dt_bias, -5.0)
    for head, channel in ((0, 0), (1, 2)):
        index = head * 3 + channel
        expected = -5 * torch.sigmoid(a_log[head].exp() * (z[:, index] + dt_bias[index]))
        torch.testing.assert_close(g[:, head, channel], expected)
    folded = folded_gate(z, *fold_gate(a_log, dt_bias, -5.0), -5.0, 2)
    torch.testing.assert_close(folded, g, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bound", [0.0, 1.0, -5.5, float("nan")])
def test_gate_refuses_a_bound_the_chunks_cannot_hold(bound: float) -> None:
    with pytest.raises(ValueError, match="gate_lower_bound is"):
        gate(torch.zeros(1, 4), torch.zeros(2), torch.zeros(4), bound)
    with pytest.raises(ValueError, match="gate_lower_bound is"):
        fold_gate(torch.zeros(2), torch.zeros(4), bound)


def test_normalised_q_carries_the_scale_and_k_has_unit_length() -> None:
    qkv = torch.randn(3, 3 * HEADS * WIDTH)
    q, k, v = normalise_qk(qkv, HEADS)
    raw = qkv.view(3, 3, HEADS, WIDTH)
    torch.testing.assert_close(q, l2norm(raw[:, 0]) * WIDTH**-0.5)
    torch.testing.assert_close(k, l2norm(raw[:, 1]))
    assert torch.equal(v, raw[:, 2])


def test_l2norm_adds_its_eps_inside_the_root() -> None:
    torch.testing.assert_close(l2norm(torch.tensor([3e-3, 4e-3])), torch.tensor([3e-3, 4e-3]) / (2.6e-5**0.5))


@pytest.mark.parametrize("chunk_size", [0, 8, 48])
def test_chunk_sizes_that_are_no_power_of_two_are_refused(chunk_size: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_size is {chunk_size}; it must be a power of two"):
        kda_chunk(*inputs(3), chunk_size=chunk_size)


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="got no tokens"):
        kda_chunk(*[t[:0] for t in inputs(1)[:5]], state=inputs(1)[5])
