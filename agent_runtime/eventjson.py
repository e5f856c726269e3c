"""Events and results of a run as JSON, for programs that watch it from outside."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from agent_runtime.events import Event, RunFinished, RunResult, StepFinished, StepRecord, ToolFinished, ToolRun


def event_json(event: Event) -> dict[str, Any]:
    """One event with its name under `event`: `StepStarted(1)` is `{"event": "step_started", "step": 1}`."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(event).__name__).lower()
    if isinstance(event, RunFinished):
        return {"event": name, **result_json(event.result)}
    if isinstance(event, StepFinished):
        return {"event": name, **step_json(event.record)}
    if isinstance(event, ToolFinished):
        return {"event": name, **_tool_json(ToolRun(event.call, event.result))}
    return {"event": name, **asdict(event)}


def result_json(result: RunResult) -> dict[str, Any]:
    """A whole run."""
    return {
        "status": result.status,
        "text": result.text,
        "output": None if result.output is None else result.output.model_dump(mode="json"),
        "usage": {**asdict(result.usage), "extend_tokens": result.usage.extend_tokens},
        "steps": [step_json(step) for step in result.steps],
    }


def step_json(record: StepRecord) -> dict[str, Any]:
    """A step with its tools in the words for users."""
    facts = {name: value for name, value in asdict(record).items() if name != "tools"}
    return {**facts, "tools": [_tool_json(run) for run in record.tools]}


def _tool_json(run: ToolRun) -> dict[str, Any]:
    failure = run.result.failure
    return {"call": asdict(run.call), "result": run.result.user, "failure": None if failure is None else str(failure)}
