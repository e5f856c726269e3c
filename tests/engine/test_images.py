"""Pictures in prompts on the golden checkpoint: reference logits, cut prefills, prefix hits, refusals.

The server cuts a prefill every 64 tokens, so every picture of 56 tokens below is computed in two or three pieces.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from k3_sglang.config import K3Config
from k3_sglang.loading.slots import load_all
from k3_sglang.reference.checkpoint import VISION_PREFIXES, load_weights
from k3_sglang.vision.projector import ImageEncoder
from k3_sglang.vision.prompt import expand
from k3_sglang.vision.support import image_support
from k3_sglang.vision.table import build_vision_table
from tests.engine.conftest import golden_arguments, two_free_ports
from tests.engine.stack import Engine, Generated, Stack, running
from tests.model.vision_cases import ReferenceWithImages

MAX_LOGPROB_ERROR = 1e-3
PAD = 1010
"""The golden checkpoint's image placeholder."""
ORDINARY = 1000
"""Ids below its control tokens."""
SIDES, TOKENS = (224, 196), 56
"""A picture of 8 x 7 tokens."""
GRID = 64
"""Distance of positions whose state is kept."""


@pytest.fixture(scope="module")
def seeing_server(golden: Path) -> Iterator[Stack]:
    """An engine on the golden checkpoint that cuts a prefill every 64 tokens."""
    arguments = [*golden_arguments(golden, "float32"), "--chunked-prefill-tokens", str(GRID)]
    with running(arguments, *two_free_ports()) as started:
        yield started


@pytest.fixture
def seeing(seeing_server: Stack) -> Iterator[Engine]:
    """That engine with an empty prefix cache."""
    client = Engine(seeing_server.engine_url)
    with client.http:
        client.flush()
        yield client


def data_url(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def noise(seed: int, sides: tuple[int, int] = SIDES) -> Image.Image:
    """A picture of random colours."""
    return Image.frombytes("RGB", sides, random.Random(seed).randbytes(3 * sides[0] * sides[1]))


def almost(picture: Image.Image) -> Image.Image:
    """The same picture but for its last pixel."""
    changed, corner = picture.copy(), (picture.width - 1, picture.height - 1)
    changed.putpixel(corner, tuple(255 - value for value in picture.getpixel(corner)))  # type: ignore[union-attr]
    return changed


def text(length: int, seed: int) -> list[int]:
    """Random ordinary ids."""
    return random.Random(seed).choices(range(ORDINARY), k=length)


def cold(engine: Engine, ids: list[int], images: Sequence[str], new_tokens: int = 16) -> Generated:
    """What a request gives when nothing is cached."""
    engine.flush()
    answer = engine.generate(ids, new_tokens, images)
    assert answer.cached_tokens == 0
    return answer


# --- against the reference ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected(golden: Path) -> dict[str, Tensor]:
    """The reference's pictures and logits."""
    return load_file(golden / "expected" / "image.safetensors")


def assert_logprobs(engine: Engine, ids: list[int], images: list[str], expanded: list[int], logits: Tensor) -> None:
    """Log-probabilities of all text tokens, and the greedy token after the prompt, are those of the logits."""
    reference = torch.log_softmax(logits.double(), -1)
    wanted = reference[torch.arange(len(expanded) - 1), torch.tensor(expanded[1:])]
    got = torch.tensor(engine.prompt_logprobs(ids, images), dtype=torch.float64)
    words = torch.tensor(expanded[1:]) != PAD
    assert (got - wanted)[words].abs().max().item() <= MAX_LOGPROB_ERROR
    answer = engine.generate(ids, 1, images)
    assert answer.prompt_tokens == len(expanded)
    assert answer.ids == (int(reference[-1].argmax()),)


@pytest.mark.parametrize("name", ["one_image", "two_images"])
def test_log_probabilities_of_image_prompts_equal_the_released_reference(
    seeing: Engine, golden: Path, expected: dict[str, Tensor], name: str
) -> None:
    prompt: dict[str, Any] = json.loads((golden / "expected" / "prompts.json").read_text())["image"][name]
    images = [data_url(Image.fromarray(expected[f"image.{i}"].numpy())) for i in prompt["images"]]
    logits = expected[f"{name}.logits.fp32"]
    assert_logprobs(seeing, prompt["input_ids"], images, prompt["expanded_ids"], logits)


class Reference:
    """The golden checkpoint in plain PyTorch, tower included (itself compared with the release in tests/model)."""

    def __init__(self, checkpoint: Path) -> None:
        self.support, self.config = image_support(checkpoint), K3Config.from_dir(checkpoint)
        self.encoder = ImageEncoder(self.support.vision, torch.float32)
        tensors = (item for file in checkpoint.glob("*.safetensors") for item in load_file(file).items())
        image_tensors = (item for item in tensors if item[0].startswith(VISION_PREFIXES))
        load_all(build_vision_table(self.encoder), image_tensors, "golden")
        self.model = ReferenceWithImages(self.config.text, load_weights(checkpoint, self.config, torch.float32))

    def __call__(self, ids: list[int], images: list[str]) -> tuple[list[int], Tensor]:
        """Expanded ids and their logits."""
        prompt = expand(ids, images, self.support)
        rows = [self.encoder(torch.from_numpy(image.patches.pixels), image.patches.grid) for image in prompt.images]
        return prompt.ids, self.model.logits(prompt.ids, PAD, torch.cat(rows))


@pytest.fixture(scope="module")
def reference(golden: Path) -> Reference:
    return Reference(golden / "checkpoint")


@pytest.mark.parametrize("before", [0, 40, 63, 64])
def test_pictures_that_a_cut_prefill_tears_apart_count_as_one_piece(
    seeing: Engine, reference: Reference, before: int
) -> None:
    ids = [*text(before, 1), PAD, *text(3, 2), PAD, PAD, *text(5, 3)]
    images = [data_url(noise(1)), data_url(noise(2)), data_url(noise(1))]
    expanded, logits = reference(ids, images)
    assert len(expanded) == before + 8 + 3 * TOKENS
    assert_logprobs(seeing, ids, images, expanded, logits)


# --- prefix cache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [5, 30, 64, 70])
def test_a_prefix_hit_inside_or_after_a_picture_gives_the_tokens_of_a_cold_run(seeing: Engine, before: int) -> None:
    ids = [*text(before, 1), PAD, *text(4, 2), PAD, *text(3, 3)]
    images = [data_url(noise(1)), data_url(noise(2))]
    first = cold(seeing, ids, images)
    again = seeing.generate(ids, 16, images)
    assert again.ids == first.ids
    assert again.cached_tokens >= first.prompt_tokens // GRID * GRID - GRID
    longer = [*ids, *first.ids, PAD, *text(9, 4)]
    more = [*images, data_url(noise(3))]
    warm = seeing.generate(longer, 16, more)
    assert warm.cached_tokens >= first.prompt_tokens // GRID * GRID
    assert warm.ids == cold(seeing, longer, more).ids


def test_pictures_that_differ_in_one_pixel_share_the_text_before_them_and_nothing_more(seeing: Engine) -> None:
    before = 70
    ids = [*text(before, 5), PAD, *text(8, 6)]
    pictures = [noise(4), almost(noise(4)), noise(5)]
    alone = [cold(seeing, ids, [data_url(picture)]).ids for picture in pictures]
    assert alone[2] not in alone[:2]
    seeing.flush()
    for picture, wanted in zip(pictures, alone, strict=True):
        answer = seeing.generate(ids, 16, [data_url(picture)])
        assert answer.ids == wanted
        assert answer.cached_tokens <= before
    for picture, wanted in zip(pictures, alone, strict=True):
        answer = seeing.generate(ids, 16, [data_url(picture)])
        assert answer.ids == wanted
        assert answer.cached_tokens > before


def test_the_order_of_pictures_matters_and_a_repeated_picture_is_there_twice(seeing: Engine) -> None:
    ids = [*text(10, 7), PAD, *text(2, 8), PAD, *text(8, 9)]
    first, second = data_url(noise(6)), data_url(noise(7))
    orders = [[first, second], [second, first], [first, first], [second, second]]
    alone = [cold(seeing, ids, order).ids for order in orders]
    assert len(set(alone)) == len(orders)
    seeing.flush()
    for order, wanted in [*zip(orders, alone, strict=True)] * 2:
        assert seeing.generate(ids, 16, order).ids == wanted


def test_requests_that_run_together_keep_their_own_pictures(seeing: Engine) -> None:
    """Pictures of two sizes, shared ones and none at all, in batches the scheduler makes as it likes."""
    chooser = random.Random(3)
    pictures = [data_url(noise(seed, sides)) for seed, sides in enumerate([SIDES, SIDES, (100, 70), (30, 300)])]
    requests = [(text(40, 10), [])]
    for number in range(9):
        images = chooser.choices(pictures, k=chooser.randrange(1, 4))
        ids = text(chooser.randrange(60), 20 + number % 3)
        for _ in images:
            ids += [PAD, *text(chooser.randrange(5), number)]
        requests.append(([*ids, 1], images))
    alone = [cold(seeing, ids, images).ids for ids, images in requests]
    seeing.flush()
    order = [*range(len(requests)), *chooser.sample(range(len(requests)), len(requests))]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda i: seeing.generate(requests[i][0], 16, requests[i][1]).ids, order))
    assert together == [alone[i] for i in order]


# --- requests -----------------------------------------------------------------------------------------------------


def test_several_choices_of_a_prompt_with_several_pictures(seeing: Engine) -> None:
    ids, images = [1, PAD, 2, PAD, 3], [data_url(noise(8)), data_url(noise(9, (20, 20)))]
    wanted = cold(seeing, ids, images, 4).ids
    sampling = {"n": 2, "temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": ids, "image_data": [images], "sampling_params": sampling}
    response = seeing.http.post("/generate", json=body)
    assert [tuple(choice["output_ids"]) for choice in response.json()] == [wanted, wanted]


def test_sampling_options_that_look_at_the_prompt_survive_pictures(seeing: Engine) -> None:
    ids, images = [*text(9, 11), PAD, *text(9, 12)], [data_url(noise(10))]
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5, "min_new_tokens": 3}
    assert len(seeing.generate(ids, 8, images, **options).ids) == 8


PICTURE = data_url(noise(11, (28, 28)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_data": [PICTURE, PICTURE]}, "has 1 image placeholder(s) (token 1010), but image_data has 2"),
        ({"input_ids": [1, 2]}, "has 0 image placeholder(s) (token 1010), but image_data has 1"),
        ({"image_data": []}, "the prompt has an image placeholder (token 1010) but no image_data"),
        ({"image_data": [None]}, "the prompt has an image placeholder (token 1010) but no image_data"),
        ({"image_data": ["http://127.0.0.1:1/a.png"]}, "image_data[0]: image_source_unsupported"),
        ({"image_data": ["file:///etc/hostname"]}, "image_data[0]: image_source_unsupported"),
        ({"image_data": ["/etc/hostname"]}, "image_data[0]: image_"),
        ({"image_data": ["data:image/png;base64,AAAA"]}, "image_data[0]: image_format_unsupported"),
        ({"image_data": [PICTURE[:-40]]}, "image_data[0]: image_"),
        ({"image_data": [{"url": PICTURE, "max_pixels": 10}]}, "image_data[0]: image_source_unsupported"),
        ({"video_data": "a.mp4"}, "audio_data or video_data is given; allowed: image_data"),
        ({"audio_data": "a.wav"}, "audio_data or video_data is given; allowed: image_data"),
        ({"image_data": [data_url(Image.new("L", (2800, 2800)))]}, "has 10002 tokens, 10000 of them for images"),
        ({"input_ids": None, "text": "a <|media_pad|>"}, "has 0 image placeholder(s)"),
    ],
)
def test_what_cannot_be_used_is_a_400_that_says_so_and_the_engine_lives(
    seeing: Engine, change: dict[str, Any], message: str
) -> None:
    body = {"input_ids": [1, PAD, 2], "image_data": [PICTURE], "sampling_params": {"max_new_tokens": 1}, **change}
    response = seeing.http.post("/generate", json={key: body[key] for key in body if body[key] is not None})
    assert response.status_code == httpx.codes.BAD_REQUEST, response.text
    assert message in response.json()["error"]["message"]
    assert len(seeing.generate([1, PAD, 2], 2, [PICTURE]).ids) == 2


def test_a_streamed_refusal_comes_as_an_event(seeing: Engine) -> None:
    body = {"input_ids": [1, PAD], "image_data": ["?"], "stream": True, "sampling_params": {"max_new_tokens": 1}}
    events = seeing.http.post("/generate", json=body).text.split("\n\n")
    error = json.loads(events[0].removeprefix("data: "))["error"]
    assert error["code"] == httpx.codes.BAD_REQUEST
    assert error["message"].startswith("image_data[0]: image_source_unsupported")


def test_the_launcher_says_that_images_are_on(seeing_server: Stack) -> None:
    (line,) = (line for line in seeing_server.output if line.split()[:1] == ["images"])
    assert line.split(maxsplit=1)[1] == "on, encoder of 222.4K parameters"
