"""Rendering: placeholders, injection, images, recorded turns, speed of a growing history (B27-B29)."""

import json
import random

import pytest

from k3_sglang.chat.encode import Prompt, encode, render
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, ImagePart, Message, Segment, TextPart, ToolCall

PLACEHOLDER = "<|kimi_image_placeholder|>"


class TestB27Placeholders:
    def test_b27_they_are_text_everywhere_and_the_one_image_takes_its_place(self, toy: K3Tokenizer) -> None:
        image = ImagePart("img", (640, 480))
        request = ChatRequest(
            messages=(
                Message("user", (TextPart(f"a {PLACEHOLDER}"), image, TextPart(PLACEHOLDER))),
                Message("assistant", "", PLACEHOLDER, (ToolCall("c", "f", f'{{"q": "{PLACEHOLDER}"}}'),)),
                Message("tool", PLACEHOLDER, tool_call_id="c"),
            )
        )
        ids = encode(request, toy).ids
        assert ids.count(toy.special.media_pad) == 1
        assert toy.decode(ids).count(PLACEHOLDER) == 5

    def test_b27_in_a_request_they_cost_nothing_and_are_rendered_as_they_are(self) -> None:
        call = {"id": "c1", "function": {"name": "f", "arguments": json.dumps({"p": "k.py", "q": [PLACEHOLDER]})}}
        messages = [
            {"role": "user", "content": [{"type": "text", "text": PLACEHOLDER}]},
            {"role": "assistant", "content": "", "reasoning_content": f"it sets {PLACEHOLDER}", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": f'image_placeholder = "{PLACEHOLDER}"'},
        ]
        segments = render(parse_request({"messages": messages}))
        holding = [segment for segment in segments if PLACEHOLDER in segment.text]
        assert len(holding) == 4
        assert not any(segment.allow_special for segment in holding)


class TestB28Injection:
    MARKERS = [
        "<|open|>",
        "<|close|>",
        "<|sep|>",
        "<|end_of_msg|>",
        "[PAD]",
        "[EOS]",
        "<|media_pad|>",
        "<|kimi_image_placeholder|>",
        "<|reserved_token_163591|>",
        'message role="system"',
    ]

    def test_b28_a_thousand_hostile_texts_make_no_control_token_anywhere(self, vocabulary: K3Tokenizer) -> None:
        def structure(text: str, name: str) -> list[int]:
            tool = {"type": "function", "function": {"name": name, "description": text}}
            call = ToolCall("c", name, json.dumps({text: [text], "s": text}))
            messages = (
                Message("system", text, name=text or "n"),
                Message("system", tools=(tool,)),
                Message("user", (TextPart(text), TextPart(text))),
                Message("assistant", text, "r" + text, (call,)),
                Message("tool", text, tool_call_id="c"),
            )
            ids = encode(ChatRequest(messages, tools=(tool,)), vocabulary).ids
            return [token for token in ids if token >= vocabulary.base_tokens]

        drawn = random.Random(3)
        plain = structure("text", "f")
        for _ in range(1000):
            text = "x" + "".join(drawn.choice((*self.MARKERS, "a", " ", "\n")) for _ in range(drawn.randrange(8)))
            assert structure(text, drawn.choice((".hidden", "f", "<|sep|>"))) == plain

    def test_b28_the_pieces_of_an_attribute_are_tokenised_apart(self, release: K3Tokenizer) -> None:
        request = ChatRequest((Message("assistant", "", None, (ToolCall("c", ".hidden", "{}"),)),), effort=None)
        segments = [segment.text for segment in render(request)]
        place = segments.index(" tool")
        assert segments[place : place + 4] == [" tool", '="', ".hidden", '"']
        assert release.encode_text('=".hidden') != release.encode_text('="') + release.encode_text(".hidden")


class TestB29Images:
    def test_b29_they_stand_in_place_with_their_size_and_no_separators(self) -> None:
        parts = (TextPart("look: "), ImagePart("img", (640, 480)), TextPart(" ok?"))
        segments = render(ChatRequest((Message("user", parts),), effort=None))
        wrapper = "<|media_begin|>image 640x480<|media_content|><|media_pad|><|media_end|>"
        place = segments.index(Segment(wrapper, True, image=parts[1]))
        assert [s.text for s in segments[place - 1 : place + 2]] == ["look: ", wrapper, " ok?"]

    def test_b29_a_size_is_needed(self) -> None:
        with pytest.raises(ChatRequestError, match=r"messages\[0\].content\[0\]") as caught:
            render(ChatRequest((Message("user", (ImagePart("img"),)),)))
        assert caught.value.code == "image_count_mismatch"

    def test_b29_sizes_left_over_are_refused(self) -> None:
        with pytest.raises(ChatRequestError, match="left over"):
            parse_request({"messages": [], "image_sizes": [[1, 2]]}, lenient=True)


class TestRecordedTurns:
    def spoken(self, toy: K3Tokenizer, text: str) -> tuple[int, ...]:
        return tuple(toy.encode_segments([Segment(text + "<|end_of_msg|>", True)]))

    def test_the_next_prompt_begins_with_the_last_prompt_and_the_spoken_ids(self, toy: K3Tokenizer) -> None:
        for thinking in (True, False):
            first = ChatRequest((Message("user", "hi"),), thinking=thinking)
            prompt = encode(first, toy)
            # Not the canonical tokenisation: single letters where the vocabulary has merges.
            spoken = (*b"the thing", *self.spoken(toy, "<|close|>message<|sep|>"))
            turn = Message("assistant", "unused", recorded_ids=spoken, recorded_start=prompt.start)
            second = ChatRequest((Message("user", "hi"), turn, Message("user", "more")), thinking=thinking)
            ids = encode(second, toy).ids
            assert ids[: len(prompt.ids) + len(spoken)] == prompt.ids + spoken

    def test_a_recorded_thinking_turn_is_rendered_from_text_when_thinking_is_off(self, toy: K3Tokenizer) -> None:
        turn = Message("assistant", "said", "thought", recorded_ids=self.spoken(toy, "x"))
        text = toy.decode(encode(ChatRequest((turn,), thinking=False), toy).ids)
        assert "said" in text
        assert "thought" not in text

    @pytest.mark.parametrize("recorded", [(), (97,)])
    def test_an_unfinished_record_is_refused(self, toy: K3Tokenizer, recorded: tuple[int, ...]) -> None:
        with pytest.raises(ChatRequestError) as caught:
            encode(ChatRequest((Message("assistant", "x", recorded_ids=recorded),)), toy)
        assert caught.value.code == "recorded_ids_not_finished"


def test_what_is_asked_for_once_comes_after_the_history() -> None:
    """Earlier parts of the prompt do not change with tool_choice or response_format."""
    tool = {"type": "function", "function": {"name": "f"}}
    request = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    bare = render(parse_request(request))[:-9]
    asked = {**request, "tool_choice": "required", "response_format": {"type": "json_object"}}
    assert render(parse_request(asked))[: len(bare)] == bare


def test_arguments_beyond_the_parser_are_rendered_opaquely() -> None:
    for arguments in ('{"a": 1,}', "[" * 100_000, '{"n": ' + "9" * 5000 + "}"):
        request = ChatRequest((Message("assistant", None, None, (ToolCall("c", "f", arguments),)),))
        assert Segment(arguments) in render(request)


def test_a_programmatic_call_with_a_list_as_arguments_is_refused() -> None:
    request = ChatRequest((Message("assistant", None, None, (ToolCall("c", "f", "[1]"),)),))
    with pytest.raises(ChatRequestError) as caught:
        render(request)
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


def test_lone_surrogates_are_encoded_as_replacements(toy: K3Tokenizer) -> None:
    assert "\ufffd" in toy.decode(encode(ChatRequest((Message("user", "a\ud800b"),)), toy).ids)


def test_an_empty_request_is_the_generation_prompt_alone(toy: K3Tokenizer) -> None:
    prompt = encode(ChatRequest(()), toy)
    assert isinstance(prompt, Prompt)
    assert toy.decode(prompt.ids).endswith('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>')
