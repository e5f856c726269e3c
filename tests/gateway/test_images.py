"""Images through the gateway: what the engine is given, what they cost, what is refused, what is replayed."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from agent_runtime.errors import SettingsError
from agent_runtime.gateway.images import ImageInput
from agent_runtime.gateway.sampling import NEVER
from agent_runtime.gateway.settings import GatewaySettings
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import WEATHER_TOOL, chat, continued, streamed, user
from tests.gateway.conftest import Running
from tests.gateway.pictures import about, content_of, data_url, give_sight, image_part, look, picture
from tests.gateway.stub_engine import StubEngine
from tests.gateway.test_errors import refused

RED, BLUE = data_url(picture(56, 28, "red")), data_url(picture(56, 28, "blue"))
"""Of one size, so that only their content tells them apart: two tokens each."""
LARGE = data_url(picture(100, 100))
"""Padded to 112 x 112 pixels: 16 tokens."""


@pytest.fixture
def settings(settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The model under test sees."""
    give_sight(tmp_path)
    return settings


def text_of(request: dict[str, Any], tokenizer: K3Tokenizer) -> str:
    """The prompt an engine was sent, as text."""
    return tokenizer.decode(request["input_ids"])


async def test_the_engine_gets_one_pad_and_one_data_url_per_image_in_order(
    gateway: Running, stub: StubEngine, tokenizer: K3Tokenizer
) -> None:
    stub.image_tokens = [16, 2]
    answer = await gateway.ask(about(LARGE, RED))
    (request,) = stub.requests
    assert request["image_data"] == [LARGE, RED]
    prompt = text_of(request, tokenizer)
    begin, middle, end = "<|media_begin|>image ", "<|media_content|><|media_pad|><|media_end|>", "What is this?"
    assert f"<|sep|>{begin}100x100{middle}{begin}56x28{middle}{end}<|close|>" in prompt
    assert request["input_ids"].count(tokenizer.special.media_pad) == 2
    assert answer["usage"]["prompt_tokens"] == len(request["input_ids"]) + 15 + 1


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": RED},
        {"type": "image_url", "image_url": {"url": RED, "detail": "auto"}},
        {"type": "image_url", "image_url": {"url": RED, "detail": "high"}, "cache_control": {"type": "ephemeral"}},
        {"type": "image", "image": RED},
        {"type": "image", "image": {"url": RED}},
    ],
    ids=["string", "auto", "high", "image", "image with url"],
)
async def test_an_image_may_be_spelled_in_several_ways(
    gateway: Running, stub: StubEngine, part: dict[str, Any]
) -> None:
    stub.image_tokens = [2]
    await gateway.ask({**chat(), "messages": [{"role": "user", "content": [part]}]})
    assert stub.requests[0]["image_data"] == [RED]


async def test_the_stated_type_gives_way_to_what_the_content_is(gateway: Running, stub: StubEngine) -> None:
    jpeg = picture(28, 28, kind="JPEG")
    await gateway.ask(about(data_url(jpeg, "PNG").replace("data:image", "DATA:Image")))
    assert stub.requests[0]["image_data"] == [data_url(jpeg, "jpeg")]


async def test_a_request_without_images_sends_none(gateway: Running, stub: StubEngine) -> None:
    await gateway.ask(chat())
    assert "image_data" not in stub.requests[0]


async def test_images_of_tool_results_follow_the_order_of_the_calls(gateway: Running, stub: StubEngine) -> None:
    stub.image_tokens = [2, 2]
    calls = [
        {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": "{}"}} for name in ("a", "b")
    ]
    results = [
        {"role": "tool", "tool_call_id": name, "content": [image_part(url)]} for name, url in (("b", BLUE), ("a", RED))
    ]
    messages = [user("Compare"), {"role": "assistant", "tool_calls": calls}, *results]
    await gateway.ask({**chat(tools=[WEATHER_TOOL]), "messages": messages})
    assert stub.requests[0]["image_data"] == [RED, BLUE]


async def test_a_stream_reports_the_same_usage(gateway: Running, stub: StubEngine) -> None:
    stub.image_tokens = [16]
    whole = await gateway.ask(about(LARGE))
    response = await gateway.client.post("/v1/chat/completions", json=streamed(about(LARGE)))
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert stub.requests[0]["input_ids"] == stub.requests[1]["input_ids"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_makes_another_number_of_tokens_of_an_image_is_an_error(
    gateway: Running, stub: StubEngine, stream: bool
) -> None:
    stub.image_tokens = [4]
    error = await refused(gateway, streamed(about(LARGE)) if stream else about(LARGE), 502)
    assert error["code"] == "engine_failed"
    assert "prompt tokens" in error["message"]


class TestBudget:
    """A small window, where the positions of an image count and not its one id."""

    @pytest.fixture
    def settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {**settings, "context_len": 700, "max_image_tokens": 500, "max_images": 3}

    async def test_the_output_budget_leaves_room_for_the_expanded_prompt(
        self, gateway: Running, stub: StubEngine
    ) -> None:
        stub.image_tokens = [16]
        answer = await gateway.ask(about(LARGE))
        room = 700 - answer["usage"]["prompt_tokens"]
        assert stub.requests[0]["sampling_params"]["max_new_tokens"] == room

    async def test_a_prompt_that_only_its_images_make_too_long_is_refused(self, offline: Running) -> None:
        error = await refused(offline, about(data_url(picture(28 * 16, 28 * 20)), data_url(picture(28 * 18, 28 * 10))))
        assert error["code"] == "context_length_exceeded"

    async def test_the_images_of_a_request_are_limited_in_number_and_in_tokens(self, offline: Running) -> None:
        error = await refused(offline, about(RED, RED, RED, RED))
        assert (error["code"], error["param"]) == ("too_many_images", "messages[0].content[3]")
        error = await refused(offline, about(RED, data_url(picture(28 * 20, 28 * 25))))
        assert (error["code"], error["param"]) == ("too_many_image_tokens", "messages[0].content[1]")
        assert "560x700 pixels is 500 tokens" in error["message"]
        assert "502; allowed: 500" in error["message"]


def truncated() -> str:
    return data_url(picture(64, 64, kind="JPEG")[:-200])


def animated() -> str:
    second = Image.new("RGB", (9, 9), "blue")
    return data_url(picture(9, 9, kind="GIF", save_all=True, append_images=[second]), "gif")


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("photo.png", "image_source_unsupported"),
        ("ftp://example.org/photo.png", "image_source_unsupported"),
        ("file:///etc/photo.png", "image_source_unsupported"),
        ("http://127.0.0.1:9/photo.png", "image_source_unsupported"),
        ("https://example.org/photo.png", "image_source_unsupported"),
        ("data:image/png,abc", "image_source_unsupported"),
        ("data:image/png;base64,%%%", "image_not_base64"),
        ("data:image/png;base64," + base64.b64encode(b"not a picture").decode(), "image_format_unsupported"),
        (data_url(picture(kind="TIFF")), "image_format_unsupported"),
        (truncated(), "image_undecodable"),
        (animated(), "image_animated"),
    ],
    ids=[
        *("a name", "ftp", "file", "http", "https", "no base64 data URL"),
        *("broken base64", "text", "tiff", "truncated", "animated"),
    ],
)
async def test_an_image_that_is_not_accepted_is_a_400_that_names_its_part(
    offline: Running, url: str, code: str
) -> None:
    messages = [user("Hello"), {"role": "assistant", "content": "Hi"}, {"role": "user", "content": look(RED, url)}]
    error = await refused(offline, {**chat(), "messages": messages})
    assert (error["code"], error["param"]) == (code, "messages[2].content[1]")
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        ({"type": "image_url", "image_url": {"url": RED, "detail": "low"}}, ".image_url.detail", "unsupported_value"),
        ({"type": "image_url", "image_url": {"url": RED, "size": 3}}, ".image_url.size", "unknown_field"),
        ({"type": "image_url", "image_url": {"url": RED}, "max_pixels": 9}, ".max_pixels", "unknown_field"),
        ({"type": "image_url", "image_url": {}}, "", "invalid_type"),
        ({"type": "image_url", "image": RED}, ".image", "unknown_field"),
        ({"type": "image_url"}, "", "invalid_type"),
    ],
)
async def test_a_field_that_would_be_ignored_is_refused(
    offline: Running, part: dict[str, Any], param: str, code: str
) -> None:
    error = await refused(offline, {**chat(), "messages": [{"role": "user", "content": [part]}]})
    assert (error["code"], error["param"]) == (code, f"messages[0].content[0]{param}")


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("config.json", "no vision_config"),
        ("preprocessor_config.json", "no preprocessor_config.json"),
        ("engine", "started without images"),
    ],
)
class TestTextOnly:
    """Models that do not see."""

    @pytest.fixture
    def settings(self, settings: dict[str, Any], tmp_path: Path, missing: str) -> dict[str, Any]:
        if missing == "engine":
            return {**settings, "images": False}
        (tmp_path / missing).unlink()
        return {**settings, "allow_image_files": [tmp_path]}

    async def test_an_image_is_refused_with_the_reason(self, offline: Running, missing: str, reason: str) -> None:
        for url in (RED, "file:///anything"):
            error = await refused(offline, about(url))
            assert (error["code"], error["param"]) == ("images_unsupported", "messages[0].content[0]")
            assert "takes text only" in error["message"] and reason in error["message"]

    async def test_text_is_answered(self, gateway: Running, stub: StubEngine, missing: str, reason: str) -> None:
        await gateway.ask(chat())
        assert "logit_bias" not in stub.requests[0]["sampling_params"]


def test_a_preprocessor_configuration_that_is_wrong_ends_the_start(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"media_proc_cfg": {"patch_size": 14}}')
    with pytest.raises(SettingsError, match="media_proc_cfg"):
        ImageInput(GatewaySettings(**settings))


async def test_a_turn_is_replayed_only_behind_the_very_same_picture(gateway: Running, stub: StubEngine) -> None:
    stub.image_tokens = [2]
    first = about(RED)
    answer = await gateway.ask(first)

    async def verdict(url: str) -> str:
        body = continued({**first, "messages": about(url)["messages"]}, answer, user("And now?"))
        return (await gateway.ask(body))["k3"]["replay"]["verdict"]

    assert await verdict(RED) == "exact"
    assert await verdict(BLUE) == "foreign"
    assert await verdict(RED.replace("data:image/png", "data:image/x-png")) == "exact"
    lengths = {len(request["input_ids"]) for request in stub.requests[1:]}
    assert len(lengths) == 1, "the two histories are to differ in the picture only"


async def test_ids_of_images_are_never_generated(gateway: Running, stub: StubEngine, tokenizer: K3Tokenizer) -> None:
    await gateway.ask(chat(logit_bias={"65": 5}))
    special = tokenizer.special
    media = (special.media_begin, special.media_content, special.media_end, special.media_pad)
    assert stub.requests[0]["sampling_params"]["logit_bias"] == {"65": 5, **{str(token): NEVER for token in media}}


async def test_a_grammar_needs_no_bias_for_that(gateway: Running, stub: StubEngine) -> None:
    await gateway.ask(chat(response_format={"type": "json_object"}))
    sampling = stub.requests[0]["sampling_params"]
    assert "structural_tag" in sampling and "logit_bias" not in sampling


class TestAllowedFolder:
    """A gateway that may read pictures from one folder."""

    @pytest.fixture
    def settings(self, settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
        folder = tmp_path / "pictures"
        folder.mkdir()
        (folder / "red.png").write_bytes(content_of(RED))
        return {**settings, "allow_image_files": [folder]}

    async def test_a_file_becomes_a_data_url_and_is_the_same_picture(
        self, gateway: Running, stub: StubEngine, tmp_path: Path
    ) -> None:
        stub.image_tokens = [2, 2]
        url = f"file://{tmp_path}/pictures/red.png"
        answer = await gateway.ask(about(url))
        assert stub.requests[0]["image_data"] == [RED]
        again = continued(about(RED), answer, {"role": "user", "content": look(url)})
        assert (await gateway.ask(again))["k3"]["replay"]["verdict"] == "exact"

    async def test_a_missing_file_is_a_400_that_names_the_part(self, offline: Running, tmp_path: Path) -> None:
        error = await refused(offline, about(RED, f"file://{tmp_path}/pictures/blue.png"))
        assert (error["code"], error["param"]) == ("image_not_readable", "messages[0].content[1]")
        assert "does not exist" in error["message"]

    async def test_options_are_checked_before_anything_is_read(self, offline: Running, tmp_path: Path) -> None:
        error = await refused(offline, about(f"file://{tmp_path}/pictures/blue.png", temperature=9))
        assert error["param"] == "temperature"


async def test_a_picture_is_decoded_once_and_remembered_by_its_content(settings: dict[str, Any]) -> None:
    images = ImageInput(GatewaySettings(**settings))
    digest, checked = images.checked(content_of(LARGE))
    assert images.checked(bytes(bytearray(content_of(LARGE)))) == (digest, checked)
    assert images.checked(content_of(LARGE))[1] is checked
    assert images.checked(content_of(RED))[0] != digest
    await images.aclose()
