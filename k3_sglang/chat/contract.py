"""What a finished turn owes its request: its calls and its JSON answer, held against their schemas after decoding."""

import json
from collections.abc import Sequence
from typing import Any

from k3_sglang.chat.json_types import is_object
from k3_sglang.chat.schema_check import MAX_STEPS, schema_problem
from k3_sglang.chat.schema_keywords import StepBudget
from k3_sglang.chat.types import ChatRequest, ToolCall


def contract_problems(request: ChatRequest, content: str, calls: Sequence[ToolCall]) -> tuple[str, ...]:
    """What in a whole turn breaks a schema of `request`, one line each with its place; at most one per value.

    A grammar keeps every schema that it can express; this finds what it had to leave open (`TurnGrammar.loosened`).
    The response format is a contract about the final answer, so it is not asked of a turn that calls tools.
    """
    schemas: dict[str, Any] = {}
    for tool in request.declared_tools:
        schemas[tool["function"]["name"]] = tool["function"].get("parameters") or True
    budget = StepBudget(MAX_STEPS)
    problems: list[str] = []
    for index, call in enumerate(calls):
        problem = _json_problem(call.arguments or "{}", schemas.get(call.name, True), budget)
        if problem is not None:
            problems.append(f"tool_calls[{index}].function.arguments: {problem}")
    wanted = request.response_format
    if wanted is not None and not calls:
        problem = _json_problem(content, {"type": "object"} if wanted.schema is None else wanted.schema, budget)
        if problem is not None:
            problems.append(f"content: {problem}")
    # A value may spell half of a surrogate pair, which has no UTF-8 form.
    return tuple(problem.encode("utf-8", "backslashreplace").decode() for problem in problems)


def _json_problem(text: str, schema: Any, budget: StepBudget) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "not JSON"
    return schema_problem(value, schema, schema if is_object(schema) else {}, budget)
