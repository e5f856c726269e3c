"""The trainable model: the reference's logits, the recurrence's gradients, and a checkpoint that holds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3_sglang.config import KDA_L2NORM_EPS, K3Config
from k3_sglang.kernels.kda import kda_recurrent
from k3_sglang.kernels.mxfp4 import decode, encode
from k3_sglang.reference.model import ReferenceModel
from k3_sglang.tiny import build
from k3_sglang.tiny.train.export import export
from k3_sglang.tiny.train.fake_quant import round_mxfp4, rounded_experts
from k3_sglang.tiny.train.initial import initial_parameters
from k3_sglang.tiny.train.kda import kda
from k3_sglang.tiny.train.model import TrainableModel
from k3_sglang.tiny.train.plan import Plan, Stage
from k3_sglang.tiny.train.products import Products
from k3_sglang.tiny.train.run import CHECKPOINT_FILE, Trainer, text_config

HEADS, WIDTH = 2, 8


@pytest.fixture(scope="module")
def parameters() -> dict[str, Tensor]:
    """Parameters away from the start: even mixtures and unit norms would hide which tensor goes where."""
    generator = torch.Generator().manual_seed(3)
    values = initial_parameters(text_config(), 1)
    for name, value in values.items():
        if value.dim() == 1 or value.shape[0] == 1:
            value += 0.1 * torch.randn(value.shape, generator=generator)
        if name.endswith("lm_head.weight"):
            value *= 10
    return values


@pytest.fixture(scope="module")
def exported(parameters: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    torch.save({"parameters": parameters}, run / CHECKPOINT_FILE)
    return export(run, tmp_path_factory.mktemp("parent") / "exported")


def as_stored(name: str, value: Tensor) -> Tensor:
    if ".experts." in name:
        return decode(*encode(value))
    return value if name.endswith(("A_log", "dt_bias", "correction_bias")) else value.bfloat16().float()


def some_ids(count: int, length: int) -> Tensor:
    return torch.randint(0, text_config().vocab_size, (count, length), generator=torch.Generator().manual_seed(5))


def test_an_exported_checkpoint_gives_the_trainers_logits_in_the_reference_model(
    parameters: dict[str, Tensor], exported: Path
) -> None:
    model = TrainableModel(text_config(), {name: as_stored(name, value) for name, value in parameters.items()})
    ids = some_ids(2, 70)
    ours = model.logits(model.hidden(ids))
    reference = ReferenceModel.from_dir(exported)
    theirs = torch.stack([reference(row.tolist()) for row in ids])
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_training_starts_from_an_exported_checkpoint(parameters: dict[str, Tensor], exported: Path) -> None:
    trainer = Trainer(Plan((Stage("a", 100),)))
    before = trainer.parameters["model.layers.3.self_attn.o_proj.weight"]
    trainer.start_from(exported)
    assert trainer.parameters["model.layers.3.self_attn.o_proj.weight"] is before, "the optimiser holds these tensors"
    for name, value in trainer.parameters.items():
        assert torch.equal(value.detach(), as_stored(name, parameters[name])), name


def test_training_does_not_start_from_another_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"embed_tokens.*another shape"):
        Trainer(Plan((Stage("a", 100),))).start_from(build(tmp_path / "other"))


def test_the_export_describes_the_vocabulary_of_the_training_data(exported: Path) -> None:
    config = K3Config.from_dir(exported)
    assert config.text == text_config()
    assert config.text.vocab_size > config.media_placeholder_token_id > config.eos_token_id >= 1024
    assert config.vision is not None


def products(bf16: bool) -> list[Tensor]:
    """Results and gradients of a linear layer and of grouped experts, one of them without a row."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(2, 20, 64), (48, 64), (40, 64), (3, 48, 64)]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    made = Products(bf16)
    results = [made.linear(inputs[0], inputs[1]), made.grouped(inputs[2], inputs[3], [25, 0, 15])]
    torch.cat([result.flatten() for result in results]).square().sum().backward()
    return [*results, *(x.grad for x in inputs if x.grad is not None)]


def test_products_of_rounded_factors_stay_near_the_exact_ones() -> None:
    for exact, low in zip(products(False), products(True), strict=True):
        assert 0 < float((exact - low).detach().norm() / exact.detach().norm()) < 0.01


def test_what_follows_a_token_does_not_change_it(parameters: dict[str, Tensor]) -> None:
    model = TrainableModel(text_config(), parameters)
    ids = some_ids(1, 96)
    changed = ids.clone()
    changed[:, 50:] = 0
    torch.testing.assert_close(model.hidden(ids)[:, :50], model.hidden(changed)[:, :50], atol=1e-4, rtol=0)


def recurrent(qkv: Tensor, z: Tensor, beta: Tensor, taps: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """KDA of one sequence by its definition."""
    length = qkv.shape[1]
    padded = torch.nn.functional.pad(qkv[0], (0, 0, 3, 0))
    mixed = torch.nn.functional.silu(sum((padded[i : i + length] * taps[:, i] for i in range(4)), torch.zeros(1)))
    q, k, v = mixed.view(length, 3, HEADS, WIDTH).unbind(1)
    norms = [x * torch.rsqrt(x.square().sum(-1, keepdim=True) + KDA_L2NORM_EPS) for x in (q, k)]
    g = -5 * torch.sigmoid(rate.unsqueeze(-1) * (z.view(length, HEADS, WIDTH) + bias))
    state = torch.zeros(HEADS, WIDTH, WIDTH, dtype=qkv.dtype)
    return kda_recurrent(norms[0] * WIDTH**-0.5, norms[1], v, g, beta[0], state)[0].unsqueeze(0)


@pytest.mark.parametrize("centre", [-4.0, 3.0, 30.0])
@pytest.mark.parametrize("length", [5, 32, 77])
def test_chunked_kda_and_its_gradients_equal_the_recurrence(length: int, centre: float) -> None:
    """A centre of 30 is the strongest decay the gate allows, -5 at every token."""
    generator = torch.Generator().manual_seed(length)
    wide = HEADS * WIDTH
    shapes = [(1, length, 3 * wide), (1, length, wide), (1, length, HEADS), (3 * wide, 4), (HEADS,), (HEADS, WIDTH)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    inputs[2] = inputs[2].sigmoid()
    inputs[4] = inputs[4].exp().clamp(0.5, 2)
    inputs[5] += centre
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.clone().requires_grad_() for x in inputs]
    output, expected = kda(*ours, bound=-5.0), recurrent(*theirs)
    torch.testing.assert_close(output, expected, atol=1e-9, rtol=1e-7)
    direction = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    (output * direction).sum().backward()
    (expected * direction).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-9, rtol=1e-6)
    single = kda(*(x.float() for x in inputs), bound=-5.0)
    torch.testing.assert_close(single, expected.detach().float(), atol=2e-5, rtol=0)


@settings(deadline=None)
@given(
    st.lists(st.floats(-8, 8, width=32, allow_subnormal=False), min_size=64, max_size=64), st.sampled_from([1, 2**-9])
)
def test_rounding_in_training_is_what_packing_does(values: list[float], unit: float) -> None:
    tensor = torch.tensor(values).view(2, 32).clamp(-8, 8) * unit
    tensor = torch.where(tensor.abs() < 1e-20, torch.zeros(()), tensor)
    assert torch.equal(round_mxfp4(tensor), decode(*encode(tensor)))


def test_values_between_two_codes_round_to_the_even_one() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 4.0] + [0.0] * 23).view(1, 32)
    assert torch.equal(round_mxfp4(ties), decode(*encode(ties)))


def test_rounded_experts_pass_the_gradient_to_the_parameter() -> None:
    name = "model.layers.1.block_sparse_moe.experts.w1"
    value = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rounded = rounded_experts({name: value, "model.norm.weight": torch.ones(3)})
    assert list(rounded) == [name] and not torch.equal(rounded[name], value)
    (rounded[name] * 3).sum().backward()
    assert value.grad is not None and bool((value.grad == 3).all())
