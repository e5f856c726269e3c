"""Hints are read strictly: every mistake names its field, and a request without hints has none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from k3_sglang.cache.hints import FORK_PIN_S, MAX_POSITIONS, PARAMETER, HintError, Hints
from k3_sglang.cache.placement import Reason, Wanted


@pytest.mark.parametrize("custom_params", [None, {}, {"other": 1}, 7])
def test_a_request_without_hints_has_none(custom_params: object) -> None:
    assert Hints.from_custom_params(custom_params) == Hints()


@pytest.mark.parametrize("as_text", [False, True])
def test_all_fields_are_read_from_an_object_and_from_its_text(as_text: bool) -> None:
    raw: dict[str, Any] = {
        "session": "s1",
        "head_len": 900,
        "boundaries": [4000, 2000, 2000],
        "wait_s": 12,
        "release": True,
        "pin_s": 300.0,
        "now_s": 1e9,
        "pins": [[3000, 3600]],
        "fork": 8,
        "is_conversation": False,
    }
    hints = Hints.from_custom_params({PARAMETER: json.dumps(raw) if as_text else raw})
    assert hints == Hints("s1", 900, (2000, 4000), 12.0, True, 300.0, 1e9, ((3000, 3600.0),), 8, False)


def test_positions_are_wanted_inside_what_is_computed_only() -> None:
    hints = Hints(head_len=900, boundaries=(2000, 4000), pins=((3000, 60.0),))
    found = [(want.position, want.reason) for want in hints.wanted(0, 4000)]
    assert found == [(900, Reason.HEAD), (2000, Reason.BOUNDARY), (3000, Reason.BOUNDARY)]
    assert [want.position for want in hints.wanted(900, 5000)] == [2000, 3000, 4000]
    assert Hints().wanted(0, 100) == []


def test_a_head_announced_for_many_is_worth_a_cut_as_if_they_waited_already_and_is_kept_for_a_while() -> None:
    hints = Hints(head_len=900, fork=3)
    assert hints.wanted(0, 1000) == [Wanted(900, Reason.FAN_OUT)]
    assert hints.named == {900: FORK_PIN_S}


def test_the_longest_pin_of_a_position_counts() -> None:
    hints = Hints(head_len=900, boundaries=(2000,), pin_s=60, pins=((900, 30.0), (2000, 3600.0), (2500, 5.0)))
    assert hints.named == {900: 60.0, 2000: 3600.0, 2500: 5.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session", ""),
        ("session", 5),
        ("head_len", -1),
        ("head_len", True),
        ("head_len", 1.5),
        ("head_len", 1 << 80),
        ("boundaries", "12"),
        ("boundaries", [1, None]),
        ("boundaries", list(range(MAX_POSITIONS + 1))),
        ("pins", [[1]]),
        ("pins", [1, 2]),
        ("pins", [[1, -1]]),
        ("pins", [["1", 1]]),
        ("pins", [[1, 1]] * (MAX_POSITIONS + 1)),
        ("fork", -1),
        ("wait_s", -0.1),
        ("wait_s", float("nan")),
        ("release", 1),
        ("pin_s", "300"),
        ("pin_s", 1e300),
        ("pin_s", 10**400),
        ("now_s", float("inf")),
        ("now_s", 1e300),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_the_field(field: str, value: object) -> None:
    with pytest.raises(HintError, match=rf"{PARAMETER}\.{field} is ") as caught:
        Hints.from_custom_params({PARAMETER: {field: value}})
    assert len(str(caught.value)) < 250


def test_unknown_fields_and_other_shapes_are_errors() -> None:
    with pytest.raises(HintError, match="unknown field 'sesion'; allowed: session, "):
        Hints.from_custom_params({PARAMETER: {"sesion": "x"}})
    with pytest.raises(HintError, match="must be an object"):
        Hints.from_custom_params({PARAMETER: [1]})
    with pytest.raises(HintError, match="must be an object"):
        Hints.from_custom_params({PARAMETER: "[1]"})
    with pytest.raises(HintError, match="is not JSON"):
        Hints.from_custom_params({PARAMETER: "{" + "[" * 100_000})
