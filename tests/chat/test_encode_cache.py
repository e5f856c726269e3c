"""Encoding with a cache: the same ids as without, only what is new is tokenised, bounded in memory."""

import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.chat.encode import _short_arguments, encode, render
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, ImagePart, Message, ResponseFormat, TextPart, ToolCall

texts = st.sampled_from(["", " ", "a", "b", "<|sep|>", "the thing", "你好"])
optional = st.none() | texts
arguments = st.sampled_from(["", "{}", '{"a": 1}', '{"a": "b"}', "{"])
calls = st.builds(ToolCall, texts, st.sampled_from(["f", "g"]), arguments)
parts = st.builds(TextPart, texts) | st.builds(ImagePart, texts, st.sampled_from([(1, 2), (2, 1)]))
tools = st.sampled_from([{"type": "function", "function": {"name": name}} for name in ("f", "g")])
messages = st.one_of(
    st.builds(Message, st.sampled_from(["user", "system"]), optional | st.lists(parts).map(tuple), name=optional),
    st.builds(Message, st.just("assistant"), optional, optional, st.lists(calls, max_size=2).map(tuple), name=optional),
    st.builds(Message, st.just("tool"), optional, tool_call_id=texts, name=st.sampled_from(["f", "g", None])),
    st.builds(Message, st.just("system"), tools=tools.map(lambda tool: (tool,))),
    st.builds(Message, st.just("assistant"), texts, recorded_ids=st.just((97, 277))),
)
requests = st.builds(
    ChatRequest,
    st.lists(messages, max_size=6).map(tuple),
    tools=st.lists(tools, max_size=1).map(tuple),
    tool_choice=st.sampled_from([None, "none", "required"]),
    response_format=st.none() | st.builds(ResponseFormat, st.just("json_schema"), st.just({"type": "object"})),
    effort=st.sampled_from(["low", "max", None]),
    thinking=st.booleans(),
    add_generation_prompt=st.booleans(),
)


def outcome(request: ChatRequest, tokenizer: K3Tokenizer, cache: EncodeCache | None) -> Any:
    try:
        return encode(request, tokenizer, cache)
    except ChatRequestError as error:
        return str(error)


@settings(max_examples=400, deadline=None)
@given(st.lists(requests, min_size=2, max_size=5), st.sampled_from([300, 100_000]))
def test_a_cache_changes_no_id_and_no_error(toy: K3Tokenizer, several: list[ChatRequest], max_tokens: int) -> None:
    cache = EncodeCache(max_tokens)
    for request in (*several, *several):
        assert outcome(request, toy, cache) == outcome(request, toy, None)
        assert cache.tokens <= max_tokens


def test_the_reference_prompts_come_out_of_a_cache_as_they_went_in(golden: Path, release: K3Tokenizer) -> None:
    cache = EncodeCache()
    lines = (golden / "encoding.jsonl").read_text(encoding="utf-8").splitlines()
    for case in [json.loads(line) for line in lines] * 2:
        if "error" not in case:
            parsed = parse_request(case["request"], lenient=True)
            assert list(encode(parsed, release, cache).ids) == case["token_ids"]
    assert len(cache) > 50


def long_history(turns: int) -> list[dict[str, Any]]:
    """An agent's session of about 100 tokens per message."""
    words = "measure the flow of water through a narrow channel and note it down; " * 6
    history: list[dict[str, Any]] = []
    for n in range(turns):
        call = {"id": f"c{n}", "function": {"name": "read_file", "arguments": json.dumps({"path": f"src/{n}.py"})}}
        history += (
            {"role": "user", "content": f"{n}: {words}"},
            {"role": "assistant", "content": f"{n}. {words}", "reasoning_content": f"Hm {n}. ", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{n}", "content": f"{n} {words}"},
        )
    return history


def test_only_the_new_turn_is_tokenised(toy: K3Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenised: list[str] = []
    plain = toy.encode_text
    monkeypatch.setattr(toy, "encode_text", lambda text: tokenised.append(text) or plain(text))
    cache = EncodeCache()
    history = long_history(50)
    encode(parse_request({"messages": history}), toy, cache)
    tokenised.clear()
    encode(parse_request({"messages": [*history, {"role": "user", "content": "And now?"}]}), toy, cache)
    assert tokenised in (["And now?"], [])


def test_the_least_recently_used_part_goes_first_and_huge_ones_are_not_kept() -> None:
    cache = EncodeCache(400)
    for name in "abc":
        cache.keep(name, (1, 2))
    for name in "def":
        assert cache.find(["a"]) == [(1, 2)]
        cache.keep(name, (3,))
    assert cache.find(["a"]) == [(1, 2)]
    cache.keep("g", (3,))
    assert cache.find(["a", "b", "c", None, "g"]) == [(1, 2), None, None, None, (3,)]
    cache.keep("huge", range(100))
    assert cache.find(["huge"]) == [None]
    assert cache.tokens <= 400
    with pytest.raises(ValueError, match="max_tokens=0"):
        EncodeCache(0)


def test_threads_share_a_cache(toy: K3Tokenizer) -> None:
    cache = EncodeCache(2_000)
    bodies = [{"messages": long_history(turns)} for turns in range(1, 9)]
    expected = [encode(parse_request(body), toy) for body in bodies]
    wrong: list[int] = []

    def run(offset: int) -> None:
        for step in range(40):
            place = (offset + step) % len(bodies)
            if encode(parse_request(bodies[place]), toy, cache) != expected[place]:
                wrong.append(place)

    threads = [threading.Thread(target=run, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.tokens <= 2_000


def test_what_a_key_says_beside_the_prompt_counts_too(toy: K3Tokenizer) -> None:
    """An id of a call is in no prompt, and reasoning is in none while thinking is off."""
    for place, (long, thinking) in enumerate((("id", True), ("reasoning", False))):
        cache = EncodeCache(40_000)
        for turn in range(60):
            text = f"{turn} " + "x" * 20_000
            call = ToolCall(text if long == "id" else "c", "f", "{}")
            reasoning = text if long == "reasoning" else None
            message = Message("assistant", "hi", reasoning, (call,))
            encode(ChatRequest((message,), thinking=thinking), toy, cache)
        assert cache.tokens <= 40_000 and 1 <= len(cache) * 20_000 <= 40_000 * 8 + 40_000, place


def test_a_memory_of_short_arguments_is_small(toy: K3Tokenizer) -> None:
    _short_arguments.cache_clear()
    tracemalloc.start()
    try:
        for turn in range(200):
            arguments = json.dumps({f"{turn:x}{place:x}": 1 for place in range(150)})
            render(ChatRequest((Message("assistant", "", None, (ToolCall("", "f", arguments),)),)))
        assert tracemalloc.get_traced_memory()[0] < 10_000_000
    finally:
        tracemalloc.stop()
