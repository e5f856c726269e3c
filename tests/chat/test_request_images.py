"""Image parts of requests: who measures them, and that whoever fetches sources first finds the same ones."""

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.chat.encode import render
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.request_messages import image_sources
from k3_sglang.chat.types import ImagePart

TEXT = {"type": "text", "text": "x"}
FIRST = {"type": "image_url", "image_url": {"url": "a"}}
SECOND = {"type": "image", "image": "b"}


class Measure:
    """Notes what it is asked for; the n-th image is n pixels wide."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def __call__(self, source: str, param: str) -> ImagePart:
        self.asked.append((param, source))
        return ImagePart(source, (len(self.asked), 7))


def test_images_are_measured_in_order_by_the_place_of_their_part() -> None:
    measure = Measure()
    body = {"messages": [{"role": "system", "content": [FIRST]}, {"role": "user", "content": [TEXT, SECOND]}]}
    text = "".join(segment.text for segment in render(parse_request(body, images=measure)))
    assert measure.asked == [("messages[0].content[0]", "a"), ("messages[1].content[1]", "b")]
    assert text.index("image 1x7") < text.index("image 2x7")


def test_without_anybody_to_measure_them_they_are_refused() -> None:
    with pytest.raises(ChatRequestError) as refused:
        parse_request({"messages": [{"role": "user", "content": [FIRST]}]})
    assert (refused.value.param, refused.value.code) == ("messages[0].content[0]", "image_count_mismatch")


def test_sizes_given_in_the_request_win_where_they_are_read() -> None:
    measure = Measure()
    body = {"messages": [{"role": "user", "content": [FIRST]}], "image_sizes": [[30, 40]]}
    assert parse_request(body, lenient=True, images=measure).messages[0].content == (ImagePart("a", (30, 40)),)
    assert measure.asked == []


part = st.sampled_from([TEXT, FIRST, SECOND, {"type": "image"}, {"type": "image_url", "image_url": 3}, {"type": []}])
content = st.none() | st.text(max_size=2) | st.integers() | st.lists(part | st.none() | st.text(max_size=2), max_size=4)
role = st.sampled_from(["user", "system", "assistant", "tool", "other"])
message = st.none() | st.fixed_dictionaries({"content": content}, optional={"role": role})


@settings(deadline=None)
@given(messages=st.none() | st.lists(message, max_size=4), lenient=st.booleans())
def test_what_is_measured_has_been_found_before_whatever_the_body_holds(messages: Any, lenient: bool) -> None:
    measure = Measure()
    body = {"messages": messages}
    found = list(image_sources(body))
    with contextlib.suppress(ChatRequestError):
        parse_request(body, lenient=lenient, images=measure)
    left = iter(found)
    assert all(asked in left for asked in measure.asked), "in the same order, none that was not found"
