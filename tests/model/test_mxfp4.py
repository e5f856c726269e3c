"""MXFP4 decodes the release's bytes exactly and encodes without loss whatever it can hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from k3_sglang.kernels.mxfp4 import GROUP_SIZE, decode, encode


def test_every_reference_case_decodes_exactly(golden: Path) -> None:
    cases = load_file(golden / "mxfp4.safetensors")
    names = sorted(name.removesuffix(".decoded") for name in cases if name.endswith(".decoded"))
    assert names
    for name in names:
        decoded = decode(cases[f"{name}.weight_packed"], cases[f"{name}.weight_scale"])
        assert torch.equal(decoded, cases[f"{name}.decoded"]), name


def test_the_low_nibble_is_the_even_index_and_bit_three_the_sign() -> None:
    packed = torch.zeros(1, GROUP_SIZE // 2, dtype=torch.uint8)
    packed[0, 0] = 0xF << 4 | 0x1
    decoded = decode(packed, torch.tensor([[128]], dtype=torch.uint8))
    assert decoded[0, :3].tolist() == [1.0, -12.0, 0.0]


def test_scale_bytes_are_powers_of_two_down_to_the_subnormal() -> None:
    packed = torch.full((255, GROUP_SIZE // 2), 0x22, dtype=torch.uint8)
    decoded = decode(packed, torch.arange(255, dtype=torch.uint8).unsqueeze(1))
    assert decoded[:, 0].double().tolist() == [2.0 ** (s - 127) for s in range(255)]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), low=st.integers(3, 250), spread=st.integers(0, 4))
def test_decoded_values_survive_encoding_and_decoding(seed: int, low: int, spread: int) -> None:
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (6, 2 * GROUP_SIZE), generator=g, dtype=torch.uint8)
    scale = torch.randint(low, low + spread + 1, (6, 4), generator=g, dtype=torch.uint8)
    values = decode(packed, scale)
    assert torch.equal(decode(*encode(values)), values)
    if scale.min() >= 1:
        assert torch.equal(decode(packed, scale, torch.bfloat16).float(), values)


def test_values_between_codes_round_to_the_nearest_and_ties_to_the_even_mantissa() -> None:
    values = torch.zeros(1, GROUP_SIZE)
    values[0, :9] = torch.tensor([4.0, 0.24, 0.25, 0.75, 1.25, 2.5, 3.5, -5.0, 7.0])
    decoded = decode(*encode(values))[0, :9].tolist()
    assert decoded == [4.0, 0.0, 0.0, 1.0, 1.0, 2.0, 4.0, -4.0, 6.0]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-100, 100))
def test_the_error_of_a_random_value_is_at_most_an_eighth_of_the_groups_largest(seed: int, exponent: int) -> None:
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    largest = values.unflatten(-1, (-1, GROUP_SIZE)).abs().amax(-1, keepdim=True)
    error = (decode(*encode(values)) - values).unflatten(-1, (-1, GROUP_SIZE)).abs()
    assert (error <= largest / 4).all()


def test_an_all_zero_group_stays_zero() -> None:
    assert torch.equal(decode(*encode(torch.zeros(2, 64))), torch.zeros(2, 64))


def test_damaged_or_misshaped_data_is_refused() -> None:
    codes, scale = torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="means NaN"):
        decode(codes, scale + 255)
    with pytest.raises(ValueError, match="do not fit together"):
        decode(codes[:, :8], scale)
    with pytest.raises(ValueError, match="needs uint8"):
        decode(codes.int(), scale)
    with pytest.raises(ValueError, match="the last axis is 40"):
        encode(torch.zeros(2, 40))
    with pytest.raises(ValueError, match="must be finite"):
        encode(torch.full((1, 32), float("inf")))
