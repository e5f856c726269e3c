"""Which form of queries and keys each attention backend gets, and which backends are refused."""

from __future__ import annotations

import pytest

from k3_sglang.layers.mla_forms import BACKENDS, plan_mla


@pytest.mark.parametrize(
    ("backend", "fresh", "cached", "decode"),
    [
        ("k3_cpu", "joined", "joined", "joined"),
        ("triton", "joined", "joined", "joined"),
        ("fa3", "split", "split", "split"),
        ("flashinfer", "expanded", "split", "split"),
        ("trtllm_mla", "expanded", "split", "split"),
    ],
)
def test_every_kind_of_pass_has_its_form(backend: str, fresh: str, cached: str, decode: str) -> None:
    plan = plan_mla(backend, backend)
    assert plan.form(decoding=False, any_cached=False) == fresh
    assert plan.form(decoding=False, any_cached=True) == cached
    assert plan.form(decoding=True, any_cached=True) == decode
    assert plan.expands == (fresh == "expanded")


def test_without_the_ragged_kernel_flashinfer_gets_the_absorbed_form_for_fresh_prompts_too() -> None:
    assert plan_mla("flashinfer", "flashinfer", ragged_prefill=False).form(decoding=False, any_cached=False) == "split"


def test_prefill_and_decode_may_differ() -> None:
    plan = plan_mla("trtllm_mla", "cutedsl_mla")
    assert plan.form(decoding=True, any_cached=False) == "split"
    assert plan.form(decoding=False, any_cached=False) == "expanded"


@pytest.mark.parametrize("backend", ["flashmla", "fa4", "cutedsl_mla"])
def test_a_prefill_backend_that_cannot_be_fed_is_refused_with_those_that_can(backend: str) -> None:
    with pytest.raises(ValueError, match=f"{backend}.*allowed: k3_cpu, triton, fa3, flashinfer, trtllm_mla"):
        plan_mla(backend, "fa3")


def test_an_unknown_decode_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=f"'aiter'.*allowed: {', '.join(BACKENDS)}"):
        plan_mla("fa3", "aiter")


def test_attention_to_cached_tokens_chunk_by_chunk_is_refused_with_the_flag_that_ends_it() -> None:
    with pytest.raises(ValueError, match="--disable-chunked-prefix-cache"):
        plan_mla("trtllm_mla", "trtllm_mla", chunked_prefix_cache=True)
    plan_mla("fa3", "fa3", chunked_prefix_cache=True)
