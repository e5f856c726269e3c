"""Every recorded mistake that weights, configuration, constants or carried state can express is seen by the comparison.

The reference model runs a mutated copy of the golden checkpoint. Golden data records how far each mistake moved the
logits of an independent implementation: ours must move as far, so the mistake made here is the mistake meant there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from k3_sglang.config import ConfigError
from k3_sglang.parity.checkpoints import read_tensors, write_checkpoint
from k3_sglang.parity.compare import FP32
from k3_sglang.parity.golden import Golden
from k3_sglang.parity.mutations import IN_CODE, MUTATIONS, REFUSED
from k3_sglang.reference import attention, model
from k3_sglang.reference.attention import KDA, KDAState, MLAState
from k3_sglang.reference.model import ReferenceModel, SequenceState

PROMPT = "len64"
NO_EFFECT = {"router_scaling_factor_ignored"}
"""The golden config's factor is 1."""

HUGE_EPS = 1e12
"""A norm with this eps divides by its square root, whatever comes in; weights times that root undo it."""


@pytest.fixture(scope="module")
def data(golden: Path) -> Golden:
    """Golden values."""
    return Golden(golden)


@pytest.fixture(scope="module")
def recorded(golden: Path) -> dict[str, Any]:
    """``mutations.json``."""
    return json.loads((golden / "mutations.json").read_text())


def assert_seen(logits: Tensor, data: Golden, entry: dict[str, Any], wanted: Tensor | None = None) -> None:
    """The logits are off by more than the limit, and as far as recorded."""
    wanted = data.logits(data.prompt(PROMPT), "float32") if wanted is None else wanted
    difference = (logits - wanted).abs()
    assert difference.max().item() > FP32.max_abs
    assert difference.max().item() == pytest.approx(entry["max_abs"], rel=0.01)
    assert difference.mean().item() == pytest.approx(entry["mean_abs"], rel=0.01)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_in_weights_or_configuration_is_seen(
    data: Golden, recorded: dict[str, Any], tmp_path: Path, name: str
) -> None:
    wrong = ReferenceModel.from_dir(MUTATIONS[name].write(data, tmp_path))
    assert_seen(wrong(data.prompt(PROMPT).ids), data, recorded["text"][name])


# --- constants ----------------------------------------------------------------------------------------------------

Patch = Callable[[ReferenceModel, pytest.MonkeyPatch], None]


def _constant(name: str, value: float) -> Patch:
    return lambda wrong, patch: patch.setattr(attention, name, value)


def _mixture_eps(eps: float) -> Patch:
    original = model.mixture
    return lambda wrong, patch: patch.setattr(
        model, "mixture", lambda rows, norm, projection, _: original(rows, norm, projection, eps)
    )


def _scores_without_norm(wrong: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    original = model.mixture
    root = HUGE_EPS**0.5
    patch.setattr(model, "mixture", lambda rows, norm, projection, _: original(rows, norm, projection * root, HUGE_EPS))


def _o_norm_eps(change: Callable[[float], float]) -> Patch:
    def patch_all(wrong: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
        for layer in wrong.layers:
            if isinstance(layer.attention, KDA):
                patch.setattr(layer.attention, "eps", change(layer.attention.eps))

    return patch_all


def _latent_norm_eps(wrong: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    for layer in wrong.layers:
        if layer.moe is not None:
            patch.setattr(layer.moe, "eps", 1e-6)


def _no_o_norm(wrong: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    _o_norm_eps(lambda _: HUGE_EPS)(wrong, patch)
    for layer in wrong.layers:
        if isinstance(layer.attention, KDA):
            weight = layer.attention.w["o_norm.weight"]
            patch.setitem(layer.attention.w, "o_norm.weight", torch.full_like(weight, HUGE_EPS**0.5))


def _no_latent_norm(wrong: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    for layer in wrong.layers:
        if layer.moe is not None:
            weight = layer.moe.w["routed_expert_norm.weight"]
            patch.setattr(layer.moe, "eps", HUGE_EPS)
            patch.setitem(layer.moe.w, "routed_expert_norm.weight", torch.full_like(weight, HUGE_EPS**0.5))


CONSTANTS: dict[str, Patch] = {
    "mla_lora_norm_eps_from_config": _constant("MLA_LATENT_NORM_EPS", 1e-5),
    "attnres_eps_1e-6": _mixture_eps(1e-6),
    "attnres_scores_without_norm": _scores_without_norm,
    "kda_l2norm_eps_1e-5": _constant("KDA_L2NORM_EPS", 1e-5),
    "kda_l2norm_eps_tiny": _constant("KDA_L2NORM_EPS", 1e-12),
    "kda_o_norm_eps_1e-6": _o_norm_eps(lambda _: 1e-6),
    "kda_o_norm_missing": _no_o_norm,
    "kda_q_scale_missing": _o_norm_eps(lambda eps: eps / 32),  # o is sqrt(head_dim) too large, which the norm undoes
    "latent_norm_eps_1e-6": _latent_norm_eps,
    "latent_norm_missing": _no_latent_norm,
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_wrong_constant_is_seen(
    data: Golden, recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    wrong = data.reference_model("float32")
    CONSTANTS[name](wrong, monkeypatch)
    assert_seen(wrong(data.prompt(PROMPT).ids), data, recorded["text"][name])


# --- carried state ------------------------------------------------------------------------------------------------


def _on_kda(change: Callable[[KDAState], None]) -> Callable[[SequenceState], None]:
    def patch_all(state: SequenceState) -> None:
        for layer in state.layers:
            if isinstance(layer, KDAState):
                change(layer)

    return patch_all


def _drop_recurrent(state: KDAState) -> None:
    state.recurrent = torch.zeros_like(state.recurrent)


def _transpose_recurrent(state: KDAState) -> None:
    state.recurrent = state.recurrent.transpose(-1, -2).contiguous()


def _round_recurrent(state: KDAState) -> None:
    state.recurrent = state.recurrent.bfloat16().float()


def _drop_window(state: KDAState) -> None:
    state.conv = torch.zeros_like(state.conv)


def _reverse_window(state: KDAState) -> None:
    state.conv = state.conv.flip(0)


def _forget_last_latent(state: SequenceState) -> None:
    for layer in state.layers:
        if isinstance(layer, MLAState):
            layer.keys, layer.values = layer.keys[:, :-1], layer.values[:, :-1]


AFTER_PREFILL: dict[str, Callable[[SequenceState], None]] = {
    "kda_state_dropped": _on_kda(_drop_recurrent),
    "kda_state_transposed": _on_kda(_transpose_recurrent),
    "conv_state_dropped": _on_kda(_drop_window),
    "conv_state_reversed": _on_kda(_reverse_window),
    "mla_latent_without_last_token": _forget_last_latent,
}


def decoded(data: Golden, state: SequenceState, each_step: Callable[[SequenceState], None] | None = None) -> Tensor:
    """Logits of the decode steps that feed the reference's greedy tokens."""
    reference, steps = data.reference_model("float32"), []
    for token in data.prompt(PROMPT).greedy[:-1]:
        if each_step is not None:
            each_step(state)
        steps.append(reference([token], state)[-1])
    return torch.stack(steps)


def assert_seen_in_decode(data: Golden, recorded: dict[str, Any], name: str, steps: Tensor) -> None:
    """The recorded figures cover all 24 steps, of which the first belongs to the prefill and is right."""
    wanted = data.tensors("greedy_logits")[f"{PROMPT}.greedy_logits"]
    assert_seen(torch.cat((wanted[:1], steps)), data, recorded["decode"][name], wanted)


@pytest.mark.parametrize("name", AFTER_PREFILL)
def test_a_mistake_in_carried_state_is_seen(data: Golden, recorded: dict[str, Any], name: str) -> None:
    reference = data.reference_model("float32")
    state = reference.new_state()
    reference(data.prompt(PROMPT).ids, state)
    AFTER_PREFILL[name](state)
    assert_seen_in_decode(data, recorded, name, decoded(data, state))


def test_a_convolution_window_one_token_too_old_is_seen(data: Golden, recorded: dict[str, Any]) -> None:
    reference, ids = data.reference_model("float32"), data.prompt(PROMPT).ids
    state = reference.new_state()
    reference(ids[:-1], state)
    old = [layer.conv for layer in state.layers if isinstance(layer, KDAState)]
    reference(ids[-1:], state)
    for layer in state.layers:
        if isinstance(layer, KDAState):
            layer.conv = old.pop(0)
    assert_seen_in_decode(data, recorded, "conv_state_one_step_old", decoded(data, state))


def test_a_recurrent_state_rounded_to_bf16_at_each_step_is_seen(data: Golden, recorded: dict[str, Any]) -> None:
    reference = data.reference_model("float32")
    state = reference.new_state()
    reference(data.prompt(PROMPT).ids, state)
    steps = decoded(data, state, each_step=_on_kda(_round_recurrent))
    assert_seen_in_decode(data, recorded, "kda_state_bf16_each_step", steps)


# --- nothing forgotten --------------------------------------------------------------------------------------------


def test_an_unchanged_copy_of_the_checkpoint_is_not_seen(data: Golden, tmp_path: Path) -> None:
    copy = write_checkpoint(data.checkpoint, tmp_path, read_tensors(data.checkpoint))
    prompt = data.prompt(PROMPT)
    logits = ReferenceModel.from_dir(copy)(prompt.ids)
    assert (logits - data.logits(prompt, "float32")).abs().max().item() <= FP32.max_abs


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_that_the_configuration_asks_for_is_refused(data: Golden, tmp_path: Path, name: str) -> None:
    wrong = write_checkpoint(data.checkpoint, tmp_path, {}, REFUSED[name])
    with pytest.raises(ConfigError, match=next(iter(REFUSED[name]))):
        ReferenceModel.from_dir(wrong)


def test_every_recorded_mistake_is_either_made_here_or_needs_other_code(recorded: dict[str, Any]) -> None:
    assert not MUTATIONS.keys() & CONSTANTS.keys()
    assert MUTATIONS.keys() | CONSTANTS.keys() | IN_CODE.keys() | NO_EFFECT == recorded["text"].keys()
    in_time = {"conv_state_one_step_old", "kda_state_bf16_each_step"}
    assert AFTER_PREFILL.keys() | in_time | {"none"} == recorded["decode"].keys()
