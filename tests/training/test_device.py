"""Training on a GPU, as far as a machine without one can tell: nothing of a forward pass is made on another device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from k3_sglang.tiny.__main__ import main
from k3_sglang.tiny.train import kda
from k3_sglang.tiny.train.fake_quant import rounded_experts
from k3_sglang.tiny.train.initial import parameter_shapes
from k3_sglang.tiny.train.model import TrainableModel
from k3_sglang.tiny.train.run import text_config


class _Even:
    """Counts of tokens by expert, which tensors without values cannot know."""

    def __init__(self, chosen: torch.Tensor, minlength: int) -> None:
        self.counts = [chosen.numel() // minlength] * minlength

    def tolist(self) -> list[int]:
        return self.counts


@pytest.fixture
def forget_constants() -> Iterator[None]:
    yield
    kda._sums.cache_clear()


@pytest.mark.usefixtures("forget_constants")
def test_every_tensor_of_a_forward_pass_is_where_the_parameters_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values behave like ones on a GPU: an operation on two devices is an error."""
    monkeypatch.setattr(torch, "bincount", _Even)
    text = text_config()
    with FakeTensorMode():
        shapes: dict[str, Any] = parameter_shapes(text)
        parameters = {name: torch.empty(shape, device="cuda") for name, shape in shapes.items()}
        model = TrainableModel(text, parameters)
        ids = torch.zeros(2, 80, dtype=torch.int64, device="cuda")
        logits = model.logits(model.hidden(ids, rounded_experts(parameters)))
        assert logits.device.type == "cuda" and logits.shape == (2, 80, text.vocab_size)
        with pytest.raises(RuntimeError, match="device"):
            model.hidden(ids.cpu())


def test_several_workers_on_a_gpu_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["train", "--out", str(tmp_path / "run"), "--workers", "2", "--device", "cuda", "--no-fusion"]
    assert main(asked) == 2
    assert "--workers 2 is for processors and the device is cuda; add --device cpu" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
