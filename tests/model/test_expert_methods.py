"""Which MoE runner computes MXFP4 experts with SiTU on which device; refusals that say what the device supports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3_sglang.layers.expert_methods import REFUSED, SUPPORT, ExpertMethodError, Part, choose_expert_method

PARTS: tuple[Part, ...] = ("flashinfer_situ", "marlin", "deep_gemm")
EVERYTHING = frozenset(PARTS)
MARLIN: frozenset[Part] = frozenset({"marlin"})


@pytest.mark.parametrize(
    ("capability", "parts", "method"),
    [
        ((9, 0), EVERYTHING, "marlin"),
        ((10, 0), EVERYTHING, "flashinfer_mxfp4"),
        ((10, 3), MARLIN, "marlin"),
        ((12, 0), EVERYTHING, "marlin"),
    ],
)
def test_auto_takes_the_fastest_method_of_the_device(
    capability: tuple[int, int], parts: frozenset[Part], method: str
) -> None:
    assert choose_expert_method("auto", capability=capability, parts=parts) == method


def test_a_method_can_be_asked_for_where_the_device_has_it() -> None:
    assert choose_expert_method("marlin", capability=(10, 0), parts=EVERYTHING) == "marlin"
    assert choose_expert_method("deep_gemm", capability=(10, 0), parts=EVERYTHING) == "deep_gemm"


@pytest.mark.parametrize("runner", ["triton", "triton_kernel"])
def test_runners_that_would_compute_something_else_are_refused_with_the_reason(runner: str) -> None:
    with pytest.raises(ExpertMethodError) as refusal:
        choose_expert_method(runner, capability=(9, 0), parts=EVERYTHING)
    assert REFUSED[runner] in str(refusal.value)
    assert "supported there: marlin (ready); use --moe-runner-backend marlin" in str(refusal.value)


def test_flashinfer_outside_blackwell_servers_would_apply_another_activation() -> None:
    with pytest.raises(ExpertMethodError, match=r"compute capability 12\.0: .*SwiGLU.*--moe-runner-backend marlin"):
        choose_expert_method("flashinfer_mxfp4", capability=(12, 0), parts=EVERYTHING)


def test_a_device_without_a_method_is_told_which_devices_have_one() -> None:
    with pytest.raises(ExpertMethodError, match=r"no method on compute capability 8\.9.*9\.x, 10\.x, 12\.x"):
        choose_expert_method("auto", capability=(8, 9), parts=EVERYTHING)


def test_missing_software_is_named() -> None:
    with pytest.raises(ExpertMethodError, match=r"marlin \(not installed: marlin\); install one of them"):
        choose_expert_method("auto", capability=(9, 0), parts=frozenset())


@given(
    asked=st.sampled_from(["auto", "triton", "aiter", *(entry.method for entry in SUPPORT)]),
    capability=st.tuples(st.integers(5, 13), st.integers(0, 9)),
    parts=st.frozensets(st.sampled_from(PARTS)),
)
def test_what_is_chosen_is_in_the_table_and_installed(
    asked: str, capability: tuple[int, int], parts: frozenset[Part]
) -> None:
    try:
        method = choose_expert_method(asked, capability=capability, parts=parts)
    except ExpertMethodError as refusal:
        assert f"{capability[0]}.{capability[1]}" in str(refusal) and repr(asked) in str(refusal)
        return
    entry = next(entry for entry in SUPPORT if entry.method == method)
    assert capability[0] in entry.families and entry.needs in parts and asked in ("auto", method)
