"""Weights of a running engine: replaced whole or not at all, and an engine that cannot have whole ones ends."""

from __future__ import annotations

import json
import shutil
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest

from k3_sglang import tiny
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.engine.checkpoints import damage_last_expert, with_changed_shard
from tests.engine.conftest import two_free_ports
from tests.engine.stack import STOP_TIMEOUT_S, Engine, running
from tests.gateway.pictures import data_url, picture

PROMPT = [5, 900, 31, 7, 1200, 44]
NEW_TOKENS = 16
FAILED = 1
PROJECTION = "mm_projector.proj.2.weight"


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    """The tiny checkpoint that the session's server runs."""
    return tiny.ensure()


def test_the_same_checkpoint_again_changes_no_token(engine: Engine, checkpoint: Path) -> None:
    before = engine.generate(PROMPT, NEW_TOKENS)
    assert engine.update_weights(checkpoint)[0] == HTTPStatus.OK
    after = engine.generate(PROMPT, NEW_TOKENS)
    assert after.ids == before.ids
    assert after.cached_tokens == 0  # SGLang empties the cache: it belongs to the old weights


def test_a_checkpoint_that_does_not_fit_changes_nothing_and_is_named(
    engine: Engine, checkpoint: Path, tmp_path: Path
) -> None:
    before = engine.generate(PROMPT, NEW_TOKENS).ids
    norm = "language_model.model.norm.weight"
    missing = with_changed_shard(checkpoint, tmp_path / "missing", lambda tensors: tensors.pop(norm))
    status, message = engine.update_weights(missing)
    assert status == HTTPStatus.BAD_REQUEST
    assert message.startswith(f"no weights were changed: {missing}: 1 of ")
    assert f"tensors are missing: {norm} (128,)" in message
    other = with_changed_shard(checkpoint, tmp_path / "other", lambda tensors: None)
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["num_experts_per_token"] = 3
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps(config), encoding="utf-8")
    status, message = engine.update_weights(other)
    assert status == HTTPStatus.BAD_REQUEST
    assert "config.json: moe is MoEConfig(" in message
    assert engine.generate(PROMPT, NEW_TOKENS).ids == before


def test_a_checkpoint_found_damaged_while_it_is_read_brings_the_previous_one_back(
    engine: Engine, checkpoint: Path, tmp_path: Path
) -> None:
    before = engine.generate(PROMPT, NEW_TOKENS).ids
    damaged = with_changed_shard(checkpoint, tmp_path / "damaged", damage_last_expert)
    status, message = engine.update_weights(damaged)
    assert status == HTTPStatus.BAD_REQUEST
    assert "255" in message
    assert message.endswith(f"The previous weights, of {checkpoint}, were loaded again.")
    engine.flush()
    assert engine.generate(PROMPT, NEW_TOKENS).ids == before


def test_a_picture_is_encoded_by_the_weights_that_are_there_now(
    engine: Engine, checkpoint: Path, tmp_path: Path
) -> None:
    pad = K3Tokenizer.from_dir(checkpoint).special.media_pad
    ids, seen = [*PROMPT[:3], pad, *PROMPT[3:]], [data_url(picture(56, 56, "red"))]

    def last() -> float:
        return engine.prompt_logprobs(ids, seen)[-1]

    before = last()
    other = with_changed_shard(checkpoint, tmp_path / "other", lambda tensors: tensors[PROJECTION].neg_())
    assert engine.update_weights(other)[0] == HTTPStatus.OK
    assert abs(last() - before) > 1e-3
    assert engine.update_weights(checkpoint)[0] == HTTPStatus.OK
    assert last() == pytest.approx(before, abs=1e-5)


def test_a_checkpoint_that_prepares_pictures_otherwise_is_refused(
    engine: Engine, checkpoint: Path, tmp_path: Path
) -> None:
    other = with_changed_shard(checkpoint, tmp_path / "other", lambda tensors: None)
    file = other / "preprocessor_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["media_proc_cfg"]["image_mean"] = [0.1, 0.2, 0.3]
    file.unlink()
    file.write_text(json.dumps(config), encoding="utf-8")
    status, message = engine.update_weights(other)
    assert status == HTTPStatus.BAD_REQUEST
    assert "encodes or prepares images otherwise than the running model" in message


def test_weights_are_not_replaced_tensor_by_tensor(engine: Engine) -> None:
    response = engine.http.post("/begin_weight_update", json={})
    assert "no weights were changed: this model takes whole checkpoints only" in response.text


def test_dummy_weights_a_recovery_and_the_end_of_an_engine_without_whole_weights(
    stack_tokens: tuple[int, ...], checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "dummy.yaml").write_text("engine: {load-format: dummy}\n", encoding="utf-8")
    without_weights = tmp_path / "no-weights"
    without_weights.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (without_weights / file.name).symlink_to(file)
    damaged = with_changed_shard(checkpoint, tmp_path / "damaged", damage_last_expert)
    arguments = ["--config", str(tmp_path / "dummy.yaml"), "--model", str(without_weights), "--device", "cpu"]
    arguments += ["--experts", "packed", "--kv-tokens", "2048", "--state-slots", "16", "--constrain", "off"]
    with running(arguments, *two_free_ports()) as stack, Engine(stack.engine_url) as engine:
        assert engine.generate(PROMPT, NEW_TOKENS).ids == engine.generate(PROMPT, NEW_TOKENS).ids
        assert all(-50 < value < 0 for value in engine.prompt_logprobs(PROMPT))  # not NaN

        status, message = engine.update_weights(damaged)
        assert status == HTTPStatus.BAD_REQUEST
        assert "The model is incomplete" in message
        assert engine.update_weights(checkpoint)[0] == HTTPStatus.OK
        assert engine.generate(PROMPT, NEW_TOKENS).ids == stack_tokens

        overwritten = with_changed_shard(checkpoint, tmp_path / "overwritten", lambda tensors: None)
        assert engine.update_weights(overwritten)[0] == HTTPStatus.OK
        shard = max(damaged.glob("*.safetensors"))
        shutil.copyfile(shard, overwritten / shard.name)
        status, message = engine.update_weights(overwritten)
        assert status == HTTPStatus.BAD_REQUEST
        assert "could not be loaded again" in message
        with pytest.raises((httpx.HTTPError, AssertionError)):
            engine.generate(PROMPT, NEW_TOKENS)
        assert stack.process.wait(STOP_TIMEOUT_S) == FAILED
        assert stack.wait_for_output("the weights are incomplete")


@pytest.fixture
def stack_tokens(engine: Engine) -> tuple[int, ...]:
    """What the session's server answers with the tiny checkpoint's own weights."""
    return engine.generate(PROMPT, NEW_TOKENS).ids
