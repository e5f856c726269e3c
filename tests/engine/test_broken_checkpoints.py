"""Broken checkpoints are refused, and the message names the tensor: SGLang's loader, our model class, the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from k3_sglang.parity.checkpoints import INDEX_FILE, Tensors, read_tensors, write_checkpoint
from tests.engine.conftest import golden_arguments, two_free_ports
from tests.engine.stack import start

PROGRAM = Path(__file__).with_name("load_program.py")
NORM = "language_model.model.layers.3.input_layernorm.weight"
HEAD = "language_model.lm_head.weight"
PACKED = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed"
SECOND_SHARD = "model-00002-of-000002.safetensors"


def _without(tensors: Tensors) -> None:
    del tensors[NORM]


def _one_more(tensors: Tensors) -> None:
    tensors["language_model.model.layers.3.self_attn.rotary.inv_freq"] = torch.ones(16)


def _misshaped(tensors: Tensors) -> None:
    tensors[NORM] = tensors[NORM][:-1]


def _wrong_type(tensors: Tensors) -> None:
    tensors[PACKED] = tensors[PACKED].to(torch.int8)


BROKEN: dict[str, tuple[Callable[[Tensors], None], tuple[str, ...]]] = {
    "missing": (_without, (NORM, "1 of", "missing", "(128,)")),
    "extra": (_one_more, ("self_attn.rotary.inv_freq", "(16,)", "no place")),
    "misshaped": (_misshaped, (NORM, "(127,)", "(128,)")),
    "wrong type": (_wrong_type, (PACKED, "int8", "uint8")),
}
"""What is done to the tensors, and what the message must hold."""


def broken(source: Path, directory: Path, kind: str) -> Path:
    """A broken copy of a checkpoint."""
    tensors = read_tensors(source)
    BROKEN[kind][0](tensors)
    return write_checkpoint(source, directory, tensors)


def two_shards(source: Path, directory: Path, *repeated: str) -> Path:
    """A copy with the output head in a second shard, together with tensors that the first has too."""
    tensors = read_tensors(source)
    second: dict[str, Tensor] = {name: tensors[name] for name in (HEAD, *repeated)}
    del tensors[HEAD]
    write_checkpoint(source, directory, tensors)
    save_file(second, directory / SECOND_SHARD)
    index = json.loads((directory / INDEX_FILE).read_text())
    index["weight_map"][HEAD] = SECOND_SHARD
    (directory / INDEX_FILE).write_text(json.dumps(index))
    return directory


@pytest.fixture(scope="module")
def messages(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What loading each kind of checkpoint says, all with one model in one process."""
    source, folder = golden / "checkpoint", tmp_path_factory.mktemp("broken")
    directories = {"whole": source, **{kind: broken(source, folder / kind, kind) for kind in BROKEN}}
    directories["twice"] = two_shards(source, folder / "twice", NORM)
    directories["cut"] = two_shards(source, folder / "cut")
    shard = directories["cut"] / SECOND_SHARD
    shard.write_bytes(shard.read_bytes()[:-100])
    directories["whole again"] = two_shards(source, folder / "again")
    command = [sys.executable, "-W", "ignore", str(PROGRAM), *map(str, directories.values())]
    environment = {**os.environ, "SGLANG_EXTERNAL_MODEL_PACKAGE": "k3_sglang.models"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(directories, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("kind", ["whole", "whole again"])
def test_a_whole_checkpoint_loads_before_and_after_broken_ones(messages: dict[str, str | None], kind: str) -> None:
    assert messages[kind] is None


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_checkpoint_is_refused_and_the_tensor_named(messages: dict[str, str | None], kind: str) -> None:
    message = messages[kind]
    assert message is not None
    assert message.startswith("CheckpointError: checkpoint: ")
    for part in BROKEN[kind][1]:
        assert part in message


def test_a_tensor_in_two_shards_is_refused_and_named(messages: dict[str, str | None]) -> None:
    assert messages["twice"] == f"CheckpointError: checkpoint: tensor {NORM!r} appears twice"


def test_a_shard_that_ends_early_is_refused(messages: dict[str, str | None]) -> None:
    message = messages["cut"]
    assert message is not None
    assert message.startswith("CheckpointError: checkpoint: a shard cannot be read")


def test_a_server_started_on_a_broken_checkpoint_ends_with_the_tensor_named(golden: Path, tmp_path: Path) -> None:
    arguments = golden_arguments(golden, "float32")
    arguments[arguments.index("--model") + 1] = str(broken(golden / "checkpoint", tmp_path, "missing"))
    with pytest.raises(AssertionError, match="the launcher ended before ready") as caught:
        start(arguments, *two_free_ports())
    message = str(caught.value)
    assert "launch: error:" in message
    assert NORM in message[message.index("launch: error:") :]
