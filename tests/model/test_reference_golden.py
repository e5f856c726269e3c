"""The reference model gives the released implementation's numbers: logits, every layer, routing, greedy decode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from k3_sglang.reference.model import ReferenceModel

PROMPTS = ["len1", "len7", "len64", "len200"]
LAYERS = range(9)


@pytest.fixture(scope="module")
def fp32(golden: Path) -> ReferenceModel:
    return ReferenceModel.from_dir(golden / "checkpoint", torch.float32)


@pytest.fixture(scope="module")
def bf16(golden: Path) -> ReferenceModel:
    return ReferenceModel.from_dir(golden / "checkpoint", torch.bfloat16)


@pytest.fixture(scope="module")
def prompts(golden: Path) -> dict[str, Any]:
    return json.loads((golden / "expected" / "prompts.json").read_text())["text"]


@pytest.fixture(scope="module")
def logits(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "expected" / "text_logits.safetensors")


@pytest.fixture(scope="module")
def trace(fp32: ReferenceModel, prompts: dict[str, Any]) -> dict[str, Tensor]:
    """Intermediate values of our pass over the 64-token prompt."""
    values: dict[str, Tensor] = {}
    fp32(prompts["len64"]["ids"], trace=values)
    return values


@pytest.fixture(scope="module")
def expected_layers(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "expected" / "layers_len64.safetensors")


def assert_relative(name: str, actual: Tensor, expected: Tensor) -> None:
    """Largest difference over largest value, limit 1e-4."""
    assert actual.shape == expected.shape, name
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    assert error <= 1e-4, f"{name}: largest relative difference {error:.2e}"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_fp32_logits_of_every_position(
    fp32: ReferenceModel, prompts: dict[str, Any], logits: dict[str, Tensor], prompt: str
) -> None:
    actual = fp32(prompts[prompt]["ids"])
    assert (actual - logits[f"{prompt}.fp32"]).abs().max() <= 1e-3


@pytest.mark.parametrize(("prompt", "agreement"), [("len1", 1.0), ("len7", 1.0), ("len64", 0.95), ("len200", 0.95)])
def test_bf16_logits_and_choices(
    bf16: ReferenceModel, prompts: dict[str, Any], logits: dict[str, Tensor], prompt: str, agreement: float
) -> None:
    actual, expected = bf16(prompts[prompt]["ids"]), logits[f"{prompt}.bf16"]
    assert actual.dtype == torch.bfloat16
    difference = (actual.float() - expected.float()).abs()
    assert difference.mean() <= 0.10
    assert difference.max() <= 3.0
    assert (actual.argmax(-1) == expected.argmax(-1)).float().mean() >= agreement


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_and_their_logits_with_carried_state(
    fp32: ReferenceModel, prompts: dict[str, Any], golden: Path, prompt: str
) -> None:
    expected = load_file(golden / "expected" / "greedy_logits.safetensors")[f"{prompt}.greedy_logits"]
    tokens = prompts[prompt]["greedy"]
    state = fp32.new_state()
    steps = [fp32(prompts[prompt]["ids"], state)[-1]]
    steps += [fp32([token], state)[-1] for token in tokens[:-1]]
    assert (torch.stack(steps) - expected).abs().max() <= 1e-3
    assert [int(step.argmax()) for step in steps] == tokens
    assert state.length == len(prompts[prompt]["ids"]) + len(tokens) - 1
    assert fp32.greedy(prompts[prompt]["ids"], len(tokens)) == tokens


@pytest.mark.parametrize("cuts", [(1,), (63, 64), (3, 4, 100, 199)], ids=str)
def test_a_prompt_given_in_pieces_gives_the_same_logits(
    fp32: ReferenceModel, prompts: dict[str, Any], logits: dict[str, Tensor], cuts: tuple[int, ...]
) -> None:
    ids, state = prompts["len200"]["ids"], fp32.new_state()
    edges = [0, *cuts, len(ids)]
    pieces = [fp32(ids[start:end], state) for start, end in zip(edges, edges[1:], strict=False)]
    assert (torch.cat(pieces) - logits["len200.fp32"]).abs().max() <= 1e-3


@pytest.mark.parametrize("layer", LAYERS)
def test_mixtures_and_stream_of_each_layer(
    trace: dict[str, Tensor], expected_layers: dict[str, Tensor], layer: int
) -> None:
    for part in ("attn_mix", "ffn_mix", "stream"):
        name = f"layer.{layer}.{part}"
        assert_relative(name, trace[name], expected_layers[name])


def test_the_mixture_before_the_final_norm(trace: dict[str, Tensor], expected_layers: dict[str, Tensor]) -> None:
    assert_relative("output_mix", trace["output_mix"], expected_layers["output_mix"])


@pytest.mark.parametrize("layer", [0, 1, 2, 4, 5, 6])
def test_state_of_each_recurrent_layer(
    trace: dict[str, Tensor], expected_layers: dict[str, Tensor], layer: int
) -> None:
    name = f"layer.{layer}.kda_state"
    assert_relative(name, trace[name], expected_layers[name])
    conv = trace[f"layer.{layer}.kda_conv"].chunk(3, -1)
    for part, actual in zip("qkv", conv, strict=True):
        name = f"layer.{layer}.kda_conv_{part}"
        assert_relative(name, actual.t(), expected_layers[name][:, -3:])


@pytest.mark.parametrize("layer", [3, 7, 8])
def test_latent_of_each_full_attention_layer(
    trace: dict[str, Tensor], expected_layers: dict[str, Tensor], layer: int
) -> None:
    name = f"layer.{layer}.mla_latent"
    assert_relative(name, trace[name], expected_layers[name])


@pytest.mark.parametrize("layer", list(LAYERS)[1:])
def test_experts_chosen_and_their_weights(
    trace: dict[str, Tensor], expected_layers: dict[str, Tensor], layer: int
) -> None:
    ids, order = trace[f"router.{layer}.ids"].sort(-1)
    weights = trace[f"router.{layer}.weights"].gather(-1, order)
    assert torch.equal(ids, expected_layers[f"router.{layer}.ids"])
    assert (weights - expected_layers[f"router.{layer}.weights"]).abs().max() <= 1e-5


def test_every_expected_layer_value_is_compared(expected_layers: dict[str, Tensor]) -> None:
    covered = {"output_mix"} | {f"layer.{i}.{part}" for i in LAYERS for part in ("attn_mix", "ffn_mix", "stream")}
    covered |= {f"layer.{i}.kda_{part}" for i in (0, 1, 2, 4, 5, 6) for part in ("state", "conv_q", "conv_k", "conv_v")}
    covered |= {f"layer.{i}.mla_latent" for i in (3, 7, 8)}
    covered |= {f"router.{i}.{part}" for i in range(1, 9) for part in ("ids", "weights")}
    assert set(expected_layers) == covered
