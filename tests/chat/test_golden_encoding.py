"""The reference encoder's 78 recorded prompts, segment for segment and id for id."""

import json
from pathlib import Path
from typing import Any

import pytest

from k3_sglang.chat.encode import encode, render
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer

# Where a request is refused or read differently unless `lenient` asks for the reference's behaviour.
STRICT_DIFFERS = {
    "a004_unknown_role_dropped": "developer is rendered as system",
    "a005_empty_conversation": "empty_messages",
    "a008_no_generation_prompt": "add_generation_prompt is no request field",
    "a028_inject_tool_schema": "invalid_tool_name",
    "a036_effort_medium_rejected": "medium means high",
    "a037_effort_unknown_rejected": "xhigh means max",
    "a044_dynamic_tools": "content_beside_tools",
    "a049_results_partly_unmatched": "tool_name_unresolvable",
    "a068_json_schema_without_schema_key": "invalid_type",
    "a071_one_image": "image sizes are no request field",
    "a072_images_mixed": "image sizes are no request field",
    "a073_image_in_tool_result": "image sizes are no request field",
}


def outcome(request: dict[str, Any], tokenizer: K3Tokenizer, *, lenient: bool) -> Any:
    try:
        parsed = parse_request(request, lenient=lenient)
        segments = [[segment.text, segment.allow_special] for segment in render(parsed)]
        return segments, list(encode(parsed, tokenizer).ids)
    except ChatRequestError as error:
        return error.code


def expected(case: dict[str, Any]) -> Any:
    return case.get("error") or (case["segments"], case["token_ids"])


@pytest.fixture(scope="session")
def cases(golden: Path) -> list[dict[str, Any]]:
    lines = (golden / "encoding.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_all_78_cases_have_the_reference_segments_and_ids(cases: list[dict[str, Any]], release: K3Tokenizer) -> None:
    assert len(cases) == 78
    wrong = [case["id"] for case in cases if outcome(case["request"], release, lenient=True) != expected(case)]
    assert wrong == []


def test_strict_parsing_differs_from_the_reference_only_where_documented(
    cases: list[dict[str, Any]], release: K3Tokenizer
) -> None:
    differs = {case["id"] for case in cases if outcome(case["request"], release, lenient=False) != expected(case)}
    assert differs == STRICT_DIFFERS.keys()


def test_encoding_leaves_the_request_unchanged(cases: list[dict[str, Any]], release: K3Tokenizer) -> None:
    for case in cases:
        before = json.dumps(case["request"])
        outcome(case["request"], release, lenient=True)
        assert json.dumps(case["request"]) == before


def test_a_chinese_assistant_turn_with_effort_high_counts_99_prompt_tokens(release: K3Tokenizer) -> None:
    """The vendor's published count leaves out the three tokens that open the channel."""
    body = {"messages": [{"role": "assistant", "content": "你好"}], "reasoning_effort": "high"}
    assert len(encode(parse_request(body), release).ids) - 3 == 99
