"""Other checkpoints through the real loader: mistakes in weights are seen, broken files refused with the tensor named.

The golden engine takes them while it runs (``/update_weights_from_disk``), which costs no start of a server. Every test
ends with the right weights loaded again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from k3_sglang.parity.checkpoints import INDEX_FILE, Tensors, read_tensors, write_checkpoint
from k3_sglang.parity.compare import FP32, agreement
from k3_sglang.parity.engine import ScoredEngine
from k3_sglang.parity.golden import Golden
from k3_sglang.parity.mutations import MUTATIONS
from tests.engine.conftest import golden_arguments, two_free_ports
from tests.engine.stack import Engine, start

SEEN_BY_THE_ENGINE = (
    "a_log_last_entries",
    "attnres_norm_weight_ignored",
    "conv_taps_reversed",
    "mla_kv_b_blocked_layout",
    "router_bias_ignored",
    "mxfp4_nibble_swap",
)
"""One mistake per part of the model; all the others are shown with the reference model."""

PROMPT = "len64"
NORM = "language_model.model.layers.3.input_layernorm.weight"
PACKED = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed"


@pytest.fixture(scope="module")
def data(golden: Path) -> Golden:
    """Golden prompts and values."""
    return Golden(golden)


@pytest.fixture
def load(golden_engine: Engine, data: Golden) -> Iterator[Callable[[Path], dict[str, Any]]]:
    """Give the running engine other weights; the right ones come back at the end."""

    def update(checkpoint: Path) -> dict[str, Any]:
        golden_engine.wait_idle()
        body = {"model_path": str(checkpoint), "flush_cache": True}
        return golden_engine.http.post("/update_weights_from_disk", json=body).json()

    yield update
    answer = update(data.checkpoint)
    assert answer["success"], answer
    prompt = data.prompt(PROMPT)
    assert golden_engine.generate(prompt.ids, len(prompt.greedy)).ids == prompt.greedy


@pytest.mark.parametrize("name", SEEN_BY_THE_ENGINE)
def test_a_mistake_in_weights_is_seen_through_the_engine(
    golden_engine: Engine, load: Callable[[Path], dict[str, Any]], data: Golden, tmp_path: Path, name: str
) -> None:
    answer = load(MUTATIONS[name].write(data, tmp_path))
    assert answer["success"], answer
    prompt = data.prompt(PROMPT)
    scores = ScoredEngine(golden_engine.http, data.config.text.vocab_size).score(prompt.ids)
    compared = agreement(scores.prompt, data.logits(prompt, "float32"))
    assert not compared.within(FP32)
    recorded = json.loads((data.directory / "mutations.json").read_text())["text"][name]
    assert 1 - compared.top1 == pytest.approx(recorded["top1_changed"], abs=0.001)


# --- broken files -------------------------------------------------------------------------------------------------


def _without(tensors: Tensors) -> None:
    del tensors[NORM]


def _one_more(tensors: Tensors) -> None:
    tensors["language_model.model.layers.3.self_attn.rotary.inv_freq"] = torch.ones(16)


def _misshaped(tensors: Tensors) -> None:
    tensors[NORM] = tensors[NORM][:-1]


def _wrong_type(tensors: Tensors) -> None:
    tensors[PACKED] = tensors[PACKED].to(torch.int8)


BROKEN: dict[str, tuple[Callable[[Tensors], None], tuple[str, ...]]] = {
    "missing": (_without, (NORM, "missing")),
    "extra": (_one_more, ("self_attn.rotary.inv_freq",)),
    "misshaped": (_misshaped, (NORM, "(127,)", "(128,)")),
    "wrong type": (_wrong_type, (PACKED, "int8", "uint8")),
}
"""What is done to the tensors, and what the message must hold."""


def broken(data: Golden, directory: Path, kind: str) -> Path:
    """A broken copy of the golden checkpoint."""
    tensors = read_tensors(data.checkpoint)
    BROKEN[kind][0](tensors)
    return write_checkpoint(data.checkpoint, directory, tensors)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_checkpoint_is_refused_and_the_tensor_named(
    load: Callable[[Path], dict[str, Any]], data: Golden, tmp_path: Path, kind: str
) -> None:
    answer = load(broken(data, tmp_path, kind))
    assert not answer["success"]
    for part in BROKEN[kind][1]:
        assert part in answer["message"]


def add_shard(directory: Path, name: str, tensors: dict[str, Tensor]) -> Path:
    """A further shard that the index knows for a tensor of its own."""
    save_file(tensors, directory / name)
    index = json.loads((directory / INDEX_FILE).read_text())
    for tensor in tensors:
        index["weight_map"].setdefault(tensor, name)
    (directory / INDEX_FILE).write_text(json.dumps(index))
    return directory / name


def test_a_tensor_in_two_shards_is_refused_and_named(
    load: Callable[[Path], dict[str, Any]], data: Golden, tmp_path: Path
) -> None:
    tensors = read_tensors(data.checkpoint)
    head, norm = tensors.pop("language_model.lm_head.weight"), tensors[NORM]
    write_checkpoint(data.checkpoint, tmp_path, tensors)
    add_shard(tmp_path, "model-00002-of-000002.safetensors", {"language_model.lm_head.weight": head, NORM: norm})
    answer = load(tmp_path)
    assert not answer["success"]
    assert NORM in answer["message"]
    assert "twice" in answer["message"]


def test_a_shard_that_ends_early_is_refused_and_named(
    load: Callable[[Path], dict[str, Any]], data: Golden, tmp_path: Path
) -> None:
    tensors = read_tensors(data.checkpoint)
    head = tensors.pop("language_model.lm_head.weight")
    write_checkpoint(data.checkpoint, tmp_path, tensors)
    shard = add_shard(tmp_path, "model-00002-of-000002.safetensors", {"language_model.lm_head.weight": head})
    shard.write_bytes(shard.read_bytes()[:-100])
    answer = load(tmp_path)
    assert not answer["success"]
    assert shard.name in answer["message"]


def test_a_server_started_on_a_broken_checkpoint_ends_with_the_tensor_named(data: Golden, tmp_path: Path) -> None:
    arguments = golden_arguments(data.directory, "float32")
    arguments[arguments.index("--model") + 1] = str(broken(data, tmp_path, "missing"))
    with pytest.raises(AssertionError, match="the launcher ended before ready") as caught:
        start(arguments, *two_free_ports())
    message = str(caught.value)
    assert "launch: error:" in message
    assert NORM in message[message.index("launch: error:") :]
