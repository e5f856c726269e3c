"""Hints are read strictly: every mistake names its field, and a request without hints has none."""

from __future__ import annotations

import pytest

from k3_sglang.cache.hints import PARAMETER, HintError, Hints


@pytest.mark.parametrize("custom_params", [None, {}, {"other": 1}, 7])
def test_a_request_without_hints_has_none(custom_params: object) -> None:
    assert Hints.from_custom_params(custom_params) == Hints()


def test_all_fields_are_read() -> None:
    raw = {
        "session": "s1",
        "head_len": 900,
        "boundaries": [4000, 2000, 2000],
        "wait_s": 12,
        "release": True,
        "pin_s": 300.0,
        "now_s": 1e9,
    }
    hints = Hints.from_custom_params({PARAMETER: raw})
    assert hints == Hints("s1", 900, (2000, 4000), 12.0, True, 300.0, 1e9)
    assert hints.cuts(0, 4000) == [900, 2000]
    assert hints.cuts(900, 5000) == [2000, 4000]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session", ""),
        ("session", 5),
        ("head_len", -1),
        ("head_len", True),
        ("head_len", 1.5),
        ("boundaries", "12"),
        ("boundaries", [1, None]),
        ("wait_s", -0.1),
        ("wait_s", float("nan")),
        ("release", 1),
        ("pin_s", "300"),
        ("now_s", float("inf")),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_the_field(field: str, value: object) -> None:
    with pytest.raises(HintError, match=rf"{PARAMETER}\.{field} is "):
        Hints.from_custom_params({PARAMETER: {field: value}})


def test_unknown_fields_and_other_shapes_are_errors() -> None:
    with pytest.raises(HintError, match="unknown field 'sesion'; allowed: session, "):
        Hints.from_custom_params({PARAMETER: {"sesion": "x"}})
    with pytest.raises(HintError, match="must be an object"):
        Hints.from_custom_params({PARAMETER: [1]})
