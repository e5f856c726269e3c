"""Deep arguments: read or shown as text by one fixed depth, wherever in the program that is decided."""

import json
import threading

import pytest

from k3_sglang.chat.arguments import load_arguments
from k3_sglang.chat.call_stream import strict_json
from k3_sglang.chat.json_types import MAX_NESTING, nested_beyond


def deep(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + closing * levels


@pytest.mark.parametrize("wrap", ["[", '{"a":'])
def test_depth_is_counted_in_lists_and_objects(wrap: str) -> None:
    closing, inner = ("]", "") if wrap == "[" else ("}", "1")
    for levels in (1, 2, 30):
        value = json.loads(wrap * levels + inner + closing * levels)
        assert nested_beyond(value, levels - 1)
        assert not nested_beyond(value, levels)
    assert not nested_beyond("x", 0)
    assert nested_beyond([1, {"a": [2]}, "b"], 2)


def test_a_value_the_parser_reads_is_one_the_encoder_reads() -> None:
    assert strict_json(deep(MAX_NESTING)) == deep(MAX_NESTING)
    assert strict_json(deep(MAX_NESTING + 1)) is None
    assert load_arguments(f'{{"a": {deep(MAX_NESTING)}}}') is not None
    assert load_arguments(f'{{"a": {deep(MAX_NESTING + 1)}}}') is None
    assert load_arguments(f'{{"a": {deep(100_000)}}}') is None


def test_the_depth_of_the_caller_does_not_matter() -> None:
    text = f'{{"a": {deep(MAX_NESTING)}}}'
    found: list[bool] = []

    def below(frames: int) -> None:
        if frames:
            below(frames - 1)
        else:
            found.append(load_arguments(text) is not None)

    for frames in (0, 200, 400):
        thread = threading.Thread(target=below, args=(frames,))
        thread.start()
        thread.join()
    assert found == [True] * 3
