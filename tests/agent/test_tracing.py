"""Spans of a run, through OpenTelemetry's interface where it is installed, and without it."""

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from agent_runtime import tracing
from agent_runtime.compression.trigger import CompressionSettings
from agent_runtime.conversation import Usage
from agent_runtime.loop import Agent, AgentOptions
from agent_runtime.tools.registry import ToolRegistry, tool
from tests.agent.scripted_model import ScriptedModel, turn

trace = pytest.importorskip("opentelemetry.trace")


@tool
async def look() -> str:
    """Looks."""
    return "seen"


class Recorder:
    """A tracer and its spans."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, dict[str, Any]]] = []
        self.depth = 0

    @contextmanager
    def start_as_current_span(self, name: str) -> Iterator[Any]:
        made: dict[str, Any] = {}
        self.spans.append((f"{'  ' * self.depth}{name}", made))
        self.depth += 1
        yield type("Span", (), {"set_attribute": lambda _, key, value: made.__setitem__(key, value)})()
        self.depth -= 1


async def test_a_run_has_spans_for_steps_calls_tools_and_compressions(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(trace, "get_tracer", lambda name: recorder)
    tracing.tracer.cache_clear()
    try:
        script = [turn("", ("look", "{}"), usage=Usage(500, 10, 490)), turn("SUMMARY"), turn("done")]
        options = AgentOptions(CompressionSettings(400), session="mine")
        await Agent(ScriptedModel(list(script)), ToolRegistry([look]), "s", options=options).run("go")
    finally:
        tracing.tracer.cache_clear()
    names = [name for name, _ in recorder.spans]
    step = ["  step", "    model_call", "    tools"]
    assert names == ["agent_run", *step, "  compression", *step]
    run, first, call, *_ = (attributes for _, attributes in recorder.spans)
    assert run == {"k3.session": "mine", "k3.status": "completed", "k3.steps": 2} and first == {"k3.number": 1}
    assert call == {"k3.messages": 2, "k3.prompt_tokens": 500, "k3.cached_tokens": 490, "k3.completion_tokens": 10}
    assert recorder.spans[4][1]["k3.outcome"] == "compressed"


def test_without_opentelemetry_blocks_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    tracing.tracer.cache_clear()
    try:
        with tracing.span("step", number=1) as made:
            made.set(more=2)
    finally:
        tracing.tracer.cache_clear()
