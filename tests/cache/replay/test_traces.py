"""Trace files are read exactly, and what is wrong in them is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3_sglang.cache.replay.traces import TraceError, read_trace
from tests.cache.replay.conftest import TraceWriter
from tests.cache.replay.sessions import encoded

PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 30), max_size=12), st.integers(0, 63), st.integers(0, 500)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=100, deadline=None)
@given(turns=PROMPTS, packed=st.booleans())
def test_prompts_come_back_block_by_block(
    turns: list[tuple[list[int], int, int]], packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prompts, tails, outputs = zip(*turns, strict=True)
    line = (json.dumps(encoded("one", prompts, tails, outputs=outputs)) + "\n").encode()
    path = tmp_path_factory.mktemp("trace") / ("t.jsonl.gz" if packed else "t.jsonl")
    path.write_bytes(gzip.compress(line) if packed else line)
    (session,) = read_trace(path).sessions
    (stream,) = session.streams
    assert [request.blocks.tolist() for request in stream.requests] == [list(blocks) for blocks in prompts]
    assert [request.input_tokens % 64 for request in stream.requests] == list(tails)
    assert [request.output_tokens for request in stream.requests] == list(outputs)


def test_a_sub_agent_is_a_stream_that_starts_at_its_own_time(write_trace: TraceWriter) -> None:
    line = encoded("one", [[0, 1]], [0], outputs=[5])
    agent = encoded("agent", [[7], [7, 8]], [0, 0], outputs=[5, 5])
    agent |= {"subagent": "Explore", "t": 100.0}
    line["requests"].append(agent)
    (session,) = read_trace(write_trace([line])).sessions
    assert [stream.name for stream in session.streams] == ["one", "one/1"]
    assert [request.start for request in session.streams[1].requests] == [100.0, 110.0]


@given(tokens=st.integers(1, 4000), first=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_mooncake_ids_become_eight_blocks_each(
    tokens: int, first: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ids = list(range(first, first - (-tokens // 512)))
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    path.write_text(json.dumps({"timestamp": 1500, "input_length": tokens, "output_length": 3, "hash_ids": ids}))
    trace = read_trace(path)
    (request,) = trace.sessions[0].streams[0].requests
    assert trace.shared_ids
    assert request.start == 1.5
    assert request.blocks.tolist() == [first * 8 + place for place in range(tokens // 64)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 32}, "block_size is 32; allowed: 64"),
        ({"id": 5}, "id is 5"),
        ({"requests": None}, "requests is None"),
        ({"tool_tokens": -1}, "tool_tokens is -1; it must not be negative"),
    ],
)
def test_a_wrong_field_of_a_session_is_named(write_trace: TraceWriter, change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write_trace([encoded("one", [[1]], [0], outputs=[1]) | change]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keep": 3}, "keep is 3, but the previous request has 0 blocks"),
        ({"new": [[1]]}, r"a run is \[start, count\]"),
        ({"new": [[1, 5]]}, "5 blocks for input 64; there must be 1"),
        ({"input": True}, "input is True"),
    ],
)
def test_a_wrong_field_of_a_request_is_named(write_trace: TraceWriter, change: dict[str, Any], message: str) -> None:
    line = encoded("one", [[1]], [0], outputs=[1])
    line["requests"][0] |= change
    with pytest.raises(TraceError, match=message):
        read_trace(write_trace([line]))


def test_mooncake_needs_one_id_per_512_tokens(write_trace: TraceWriter) -> None:
    with pytest.raises(TraceError, match="1 hash_ids for input_length 513; there must be 2"):
        read_trace(write_trace([{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}]))


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    empty, text, packed = tmp_path / "empty.jsonl", tmp_path / "text.jsonl", tmp_path / "packed.gz"
    empty.write_text("")
    text.write_text("no json\n")
    packed.write_bytes(b"not gzip")
    with pytest.raises(TraceError, match="is empty"):
        read_trace(empty)
    with pytest.raises(TraceError, match="text.jsonl:1 is not JSON"):
        read_trace(text)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(packed)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "missing.jsonl")


def test_the_public_traces_are_read_whole(shared_traces: Path) -> None:
    agents = read_trace(shared_traces / "coding-agent-sessions.jsonl.gz")
    assert (len(agents.sessions), sum(session.num_requests for session in agents.sessions)) == (480, 33331)
    assert sum(len(session.streams) - 1 for session in agents.sessions) == 41
    mooncake = read_trace(shared_traces / "mooncake-conversation.jsonl.gz")
    assert (mooncake.format, len(mooncake.sessions)) == ("mooncake", 12031)
