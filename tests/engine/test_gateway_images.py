"""Questions about images through the whole path: the openai client, the gateway, the engine and the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from k3_sglang.chat.encode import encode
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ImagePart
from k3_sglang.vision.config import MediaConfig
from k3_sglang.vision.geometry import image_tokens
from tests.engine.stack import Engine, Stack
from tests.gateway.bodies import continued, user
from tests.gateway.pictures import data_url, look, picture

MODEL = "tiny"
SIZE = (300, 260)
"""110 tokens, more than one step of the grid on which states are kept."""
RED, BLUE = data_url(picture(*SIZE, "red")), data_url(picture(*SIZE, "blue"))


def question(*urls: str) -> dict[str, Any]:
    """A greedy request about pictures; the answer is at most one turn of the forced grammar."""
    messages = [{"role": "user", "content": look(*urls)}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 400}


@pytest.fixture
def client(stack: Stack, engine: Engine) -> Iterator[openai.OpenAI]:
    """The openai package pointed at the session's gateway, over an engine with an empty prefix cache."""
    with openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture
def gateway(stack: Stack, engine: Engine) -> Iterator[httpx.Client]:
    """The session's gateway, over an engine with an empty prefix cache."""
    with httpx.Client(base_url=stack.gateway_url, timeout=120, trust_env=False) as made:
        yield made


def ask(gateway: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """An answer that must succeed."""
    response = gateway.post("/v1/chat/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    return response.json()


def cached_tokens(answer: dict[str, Any]) -> int:
    """Prompt tokens of an answer that the engine did not compute again."""
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def expected_tokens(engine: Engine) -> tuple[int, int]:
    """Position of the picture's pad in the prompt of `question(RED)`, and the prompt's tokens, pads expanded."""
    model = Path(engine.http.get("/server_info").json()["model_path"])
    tokenizer, tokens = K3Tokenizer.from_dir(model), image_tokens(*SIZE, MediaConfig.from_dir(model))
    request = parse_request(question(RED), images=lambda source, _: ImagePart(source, SIZE))
    ids = encode(request, tokenizer).ids
    assert tokens > 64
    return ids.index(tokenizer.special.media_pad), len(ids) - 1 + tokens


def test_an_image_question_is_answered_streamed_and_not_with_its_tokens_counted(
    client: openai.OpenAI, expected_tokens: tuple[int, int]
) -> None:
    body = question(RED)
    whole = client.chat.completions.create(**body)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.prompt_tokens == expected_tokens[1]

    pieces, usage = [], None
    for chunk in client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage is not None and usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_prefix_is_shared_up_to_a_picture_and_through_it_only_when_it_is_the_same(
    gateway: httpx.Client, expected_tokens: tuple[int, int]
) -> None:
    pad = expected_tokens[0]
    assert cached_tokens(ask(gateway, question(RED))) == 0
    assert cached_tokens(ask(gateway, question(BLUE))) <= pad
    ask(gateway, question(RED))  # leaves a state before the last token, which a prompt sent again needs
    assert cached_tokens(ask(gateway, question(RED))) > pad


def test_a_session_goes_on_from_its_picture(gateway: httpx.Client, expected_tokens: tuple[int, int]) -> None:
    body = question(RED)
    answer = ask(gateway, body)
    second = ask(gateway, continued(body, answer, user("And its size?")))
    assert second["k3"]["replay"]["verdict"] == "exact"
    assert cached_tokens(second) > expected_tokens[0]
    assert second["usage"]["prompt_tokens"] > answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


def test_a_damaged_picture_is_a_400_that_names_its_part_and_the_next_question_is_answered(
    gateway: httpx.Client,
) -> None:
    damaged = data_url(picture(64, 64, kind="JPEG")[:-200])
    response = gateway.post("/v1/chat/completions", json=question(RED, damaged))
    assert response.status_code == httpx.codes.BAD_REQUEST
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("image_undecodable", "messages[0].content[1]")
    ask(gateway, question(RED, BLUE))
