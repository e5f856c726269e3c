"""Total loading: every parameter filled once, every tensor consumed, anything else an error with a name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3_sglang.loading.slots import FLOATS, CheckpointError, Pair, Slot, load_all


def slot(parameter: torch.Tensor) -> Slot:
    """A slot that copies whole."""

    def write(tensor: torch.Tensor) -> None:
        parameter.copy_(tensor)

    return Slot(tuple(parameter.shape), FLOATS, write)


@pytest.fixture
def parameters() -> dict[str, torch.Tensor]:
    """Two unwritten parameters."""
    return {"a": torch.full((2, 3), torch.nan), "b": torch.full((4,), torch.nan)}


@pytest.fixture
def slots(parameters: dict[str, torch.Tensor]) -> dict[str, Slot]:
    """Their slots."""
    return {name: slot(parameter) for name, parameter in parameters.items()}


TENSORS = [("a", torch.ones(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))]


def test_all_tensors_land(parameters: dict[str, torch.Tensor], slots: dict[str, Slot]) -> None:
    assert load_all(slots, iter(TENSORS), "file") == 2
    assert all(parameter.eq(1).all() for parameter in parameters.values())


def test_a_missing_tensor_is_named_with_its_shape(slots: dict[str, Slot]) -> None:
    with pytest.raises(CheckpointError, match=r"1 of 2 tensors are missing: b \(4,\)"):
        load_all(slots, iter(TENSORS[:1]), "file")


def test_an_unknown_tensor_is_named(slots: dict[str, Slot]) -> None:
    with pytest.raises(CheckpointError, match="'extra'.*has no place"):
        load_all(slots, iter([*TENSORS, ("extra", torch.ones(1))]), "file")


def test_a_repeated_tensor_is_named(slots: dict[str, Slot]) -> None:
    with pytest.raises(CheckpointError, match="'a' appears twice"):
        load_all(slots, iter([*TENSORS, TENSORS[0]]), "file")


def test_a_wrong_shape_names_both_shapes(slots: dict[str, Slot]) -> None:
    with pytest.raises(CheckpointError, match=r"'b' has shape \(5,\); config.json requires \(4,\)"):
        load_all(slots, iter([("b", torch.ones(5))]), "file")


def test_a_wrong_dtype_names_what_is_allowed(slots: dict[str, Slot]) -> None:
    with pytest.raises(CheckpointError, match="int64; allowed: bfloat16, float32, float16"):
        load_all(slots, iter([("b", torch.ones(4, dtype=torch.int64))]), "file")


def test_a_damaged_tensor_is_named(slots: dict[str, Slot]) -> None:
    def refuse(_tensor: torch.Tensor) -> None:
        raise ValueError("scale byte 255 means NaN")

    slots["b"] = Slot((4,), FLOATS, refuse)
    with pytest.raises(CheckpointError, match="file: tensor 'b': scale byte 255"):
        load_all(slots, iter(TENSORS), "file")


@given(st.booleans())
def test_a_pair_joins_in_either_order_and_keeps_nothing(first_comes_first: bool) -> None:
    joined: list[float] = []
    pair = Pair(lambda a, b: joined.append((a - b).item()))
    writers = [(0, torch.tensor(5.0)), (1, torch.tensor(3.0))]
    for index, tensor in writers if first_comes_first else reversed(writers):
        assert joined == []
        pair.part(index)(tensor)
    assert joined == [2.0]
