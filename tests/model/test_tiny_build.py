"""The tiny checkpoint: release layout, the same bytes every time, and weights that make mistakes visible."""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from k3_sglang import tiny
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.config import K3Config
from k3_sglang.costs import total_parameters
from k3_sglang.kernels.kda import gate
from k3_sglang.loading.slots import load_all
from k3_sglang.reference.attention import KDAState, MLAState
from k3_sglang.reference.checkpoint import VISION_PREFIXES
from k3_sglang.reference.model import ReferenceModel, SequenceState
from k3_sglang.tiny import checkpoint, vocabulary
from k3_sglang.tiny.__main__ import main
from k3_sglang.tiny.weights import tensors
from k3_sglang.vision.preprocess import preprocess
from k3_sglang.vision.projector import ImageEncoder
from k3_sglang.vision.support import image_support
from k3_sglang.vision.table import build_vision_table

TEXT = "List the files of the project and say what each of them does. Then run the tests."

SEED_0_SHA256 = "89a69ee635d7543d2523435c265e0e11adc05c46d914cd993872e8ec33e357ff"
"""Of all names and bytes. Changes with the recipe only, never with machine, torch or Python version."""


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> ReferenceModel:
    return ReferenceModel.from_dir(tiny_dir)


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> K3Tokenizer:
    return K3Tokenizer.from_dir(tiny_dir)


def test_two_builds_with_one_seed_are_identical_and_another_seed_differs(tiny_dir: Path, tmp_path: Path) -> None:
    assert contents(tiny.build(tmp_path / "again")) == contents(tiny_dir)
    other = contents(tiny.build(tmp_path / "other", seed=1))
    assert [name for name, data in contents(tiny_dir).items() if data != other[name]] == [
        name for name in contents(tiny_dir) if name.endswith(".safetensors")
    ]


def test_weights_are_the_same_on_every_machine() -> None:
    digest = hashlib.sha256()
    for name, tensor in tensors(0):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == SEED_0_SHA256


def test_files_are_those_of_a_release(tiny_dir: Path) -> None:
    assert set(contents(tiny_dir)) == {
        "config.json",
        "generation_config.json",
        "model-00001-of-000003.safetensors",
        "model-00002-of-000003.safetensors",
        "model-00003-of-000003.safetensors",
        "model.safetensors.index.json",
        "preprocessor_config.json",
        "tiktoken.model",
        "tokenizer_config.json",
    }


def test_the_image_tower_is_complete_small_and_gives_rows_as_large_as_embeddings(tiny_dir: Path) -> None:
    support = image_support(tiny_dir)
    encoder = ImageEncoder(support.vision, torch.float32)
    names = {name: tensor for name, tensor in tensors(0) if name.startswith(VISION_PREFIXES)}
    load_all(build_vision_table(encoder), names.items(), "tiny")
    assert sum(parameter.numel() for parameter in encoder.parameters()) < 1e6
    patches = preprocess(Image.effect_noise((70, 45), 80), support.media)
    rows = encoder(torch.from_numpy(patches.pixels), patches.grid)
    assert 0.7 < float(rows.std()) < 1.3
    assert float((rows[0] - rows[1]).abs().max()) > 0.3


def test_the_index_lists_every_tensor_of_every_shard_and_the_total_size(tiny_dir: Path) -> None:
    index = json.loads((tiny_dir / "model.safetensors.index.json").read_text())
    found, size = {}, 0
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(tiny_dir / file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  (not a mapping)
                found[name] = file
                tensor = shard.get_tensor(name)
                size += tensor.numel() * tensor.element_size()
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == size
    assert found["language_model.model.layers.0.mlp.up_proj.weight"] == "model-00001-of-000003.safetensors"
    assert found["language_model.model.layers.1.input_layernorm.weight"] == "model-00002-of-000003.safetensors"


def test_it_is_a_whole_k3_of_a_few_million_parameters(tiny_dir: Path) -> None:
    text = K3Config.from_dir(tiny_dir).text
    assert 2e6 < total_parameters(text) < 4e6
    assert text.layer_kinds == ("kda", "kda", "kda", "mla") * 2 + ("mla",)
    assert text.is_dense(0) and not text.is_dense(1) and text.experts_packed
    assert text.max_position_embeddings == 32_768


def test_control_tokens_lie_behind_the_pieces_as_in_the_release(tokenizer: K3Tokenizer, tiny_dir: Path) -> None:
    assert (tokenizer.base_tokens, tokenizer.vocab_size) == (1792, 2048)
    special = tokenizer.special
    release = {"bos": 0, "eos": 1, "end_of_msg": 2, "open": 3, "close": 4, "sep": 5, "media_pad": 21, "pad": 255}
    assert {name: getattr(special, name) - 1792 for name in release} == release
    config = K3Config.from_dir(tiny_dir)
    assert config.eos_token_id == special.end_of_msg
    assert config.media_placeholder_token_id == special.media_pad
    assert config.text.vocab_size == tokenizer.vocab_size


def test_every_piece_is_one_token_and_the_union_of_two_earlier_ones(tokenizer: K3Tokenizer) -> None:
    pieces = [tokenizer.decode_bytes([rank]) for rank in range(1792)]
    assert pieces[:256] == [bytes((byte,)) for byte in range(256)]
    seen = set(pieces[:256])
    for rank, piece in enumerate(pieces[256:], 256):
        assert any(piece[:cut] in seen and piece[cut:] in seen for cut in range(1, len(piece))), piece
        text = piece.decode(errors="ignore")
        if text.encode() == piece:  # a few pieces are parts of a character
            assert tokenizer.encode_text(text) == [rank]
        seen.add(piece)


def test_text_survives_the_vocabulary_and_english_is_compressed(tokenizer: K3Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_text("né 你好 \0\n" + TEXT)) == "né 你好 \0\n" + TEXT
    assert len(tokenizer.encode_text(TEXT)) < len(TEXT) / 2


def test_the_trainer_depends_on_counts_and_bytes_only() -> None:
    texts = ["abab abab cd", "cd ab <x>", "xyz xyz"]
    pieces = vocabulary.train(texts, 262)
    assert pieces == vocabulary.train(reversed(texts), 262)
    # "a" "b" 5 times; then " " "ab" and "ab" "ab" twice each, in the order of their bytes
    assert pieces[256:258] == [b"ab", b" ab"]
    with pytest.raises(ValueError, match=r"yields only \d+ pieces, 400 are wanted"):
        vocabulary.train(texts, 400)


def test_the_trainer_writes_the_format_the_tokenizer_reads(tmp_path: Path, tiny_dir: Path) -> None:
    pieces = vocabulary.train(vocabulary.corpus(), 300)
    (tmp_path / "tiktoken.model").write_bytes(vocabulary.dump(pieces))
    config = json.loads((tiny_dir / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {
        str(int(token) - 1492): entry for token, entry in config["added_tokens_decoder"].items()
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert K3Tokenizer.from_dir(tmp_path).base_tokens == 300
    assert vocabulary.main([]) == 2


def test_greedy_output_wanders_and_stays_clear_of_reserved_tokens(
    model: ReferenceModel, tokenizer: K3Tokenizer
) -> None:
    for text in (TEXT, "def f(x):\n    return x\n", '{"a": 1}'):
        tokens = model.greedy(tokenizer.encode_text(text), 64)
        assert len(set(tokens)) > 40, tokens
        protocol = {getattr(tokenizer.special, name) for name in ("end_of_msg", "open", "close", "sep")}
        assert all(token < tokenizer.base_tokens or token in protocol for token in tokens)


def test_decays_spread_from_a_half_to_nearly_one(model: ReferenceModel) -> None:
    for layer in model.config.kda_layers:
        prefix = f"model.layers.{layer}.self_attn."
        a_log = model.weights[f"{prefix}A_log"][: model.config.kda.num_heads]
        decay = gate(torch.zeros(1, 128), a_log, model.weights[f"{prefix}dt_bias"], -5.0).exp()
        assert 0.5 < decay.min() < 0.65
        assert 0.99 < decay.max() < 0.999


def test_routing_is_spread_and_not_tied(model: ReferenceModel, tokenizer: K3Tokenizer) -> None:
    trace: dict[str, torch.Tensor] = {}
    model(tokenizer.encode_text(TEXT * 3), trace=trace)
    for layer in range(1, model.config.num_layers):
        assert len(trace[f"router.{layer}.ids"].unique()) >= 12
        assert trace[f"router.{layer}.weights"].std() > 0.01


def _forget_recurrent(layer: KDAState | MLAState) -> None:
    assert isinstance(layer, KDAState)
    layer.recurrent = torch.zeros_like(layer.recurrent)


def _forget_conv(layer: KDAState | MLAState) -> None:
    assert isinstance(layer, KDAState)
    layer.conv = torch.zeros_like(layer.conv)


def _lose_one_token(layer: KDAState | MLAState) -> None:
    assert isinstance(layer, MLAState)
    layer.keys, layer.values = layer.keys[:, 1:], layer.values[:, 1:]


@pytest.mark.parametrize(
    ("layer", "damage"),
    [(layer, damage) for layer in (0, 1, 2, 4, 5, 6) for damage in (_forget_recurrent, _forget_conv)]
    + [(layer, _lose_one_token) for layer in (3, 7, 8)],
)
def test_a_damaged_state_of_any_one_layer_changes_the_greedy_output(
    model: ReferenceModel,
    tokenizer: K3Tokenizer,
    layer: int,
    damage: Callable[[KDAState | MLAState], None],
) -> None:
    ids, state = tokenizer.encode_text(TEXT), model.new_state()
    model(ids[:-1], state)
    damaged: SequenceState = copy.deepcopy(state)
    damage(damaged.layers[layer])
    assert model.greedy(ids[-1:], 32, damaged) != model.greedy(ids[-1:], 32, state)


def test_ensure_builds_once_and_leaves_nothing_else_behind(tmp_path: Path, tiny_dir: Path) -> None:
    built = [Path()] * 3
    threads = [
        threading.Thread(target=lambda i=i: built.__setitem__(i, tiny.ensure(tmp_path / "cache"))) for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(built)) == 1
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [built[0].name]
    assert contents(built[0]) == contents(tiny_dir)
    stamp = (built[0] / "config.json").stat().st_mtime_ns
    assert tiny.ensure(tmp_path / "cache") == built[0]
    assert (built[0] / "config.json").stat().st_mtime_ns == stamp


def test_a_failed_build_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "_write_shards", fail)
    with pytest.raises(OSError, match="disk full"):
        tiny.ensure(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_follows_the_environment_and_the_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("K3_SGLANG_CACHE", raising=False)
    assert checkpoint.default_cache_dir() == tmp_path / "xdg" / "k3_sglang"
    monkeypatch.setenv("K3_SGLANG_CACHE", str(tmp_path / "mine"))
    assert checkpoint.default_cache_dir() == tmp_path / "mine"
    before = checkpoint.recipe_hash()
    changed = tmp_path / "tiktoken.model"
    changed.write_bytes(checkpoint.VOCABULARY.read_bytes() + b"\n")
    monkeypatch.setattr(checkpoint, "VOCABULARY", changed)
    assert checkpoint.recipe_hash() != before


def test_the_command_builds_and_refuses_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out"
    assert main(["build", str(target), "--seed", "3"]) == 0
    assert "9 layers, 3.54 M parameters" in capsys.readouterr().out
    assert main(["build", str(target)]) == 2
    assert "is not empty; choose another directory or pass --force" in capsys.readouterr().err
    (target / "notes.txt").write_text("mine")
    assert main(["build", str(target), "--force"]) == 0
    assert (target / "notes.txt").read_text() == "mine"
    assert main(["build", str(target / "notes.txt")]) == 2
    assert "is a file; give a directory" in capsys.readouterr().err


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, k3_sglang.tiny; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
