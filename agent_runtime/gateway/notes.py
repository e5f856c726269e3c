"""The extension object ``k3`` of answers: what was found about the history, the cache and the turn."""

from dataclasses import asdict
from typing import Any

from agent_runtime.gateway.choice import Delivered
from agent_runtime.gateway.completion import Facts, Usage

MAX_NOTES = 16
MAX_NOTE_CHARS = 300
"""Bounds of what an answer says about its schemas, which come from the client."""


def completion_notes(facts: Facts, usage: Usage) -> dict[str, Any]:
    """What holds for the whole completion."""
    cache: dict[str, Any] = {**usage.cache, "cached_tokens": usage.cached_tokens, "hinted": facts.hinted}
    if facts.session is not None:
        cache["session"] = facts.session
    notes: dict[str, Any] = {"replay": facts.replay.facts(), "cache": cache}
    if facts.loosened:
        notes["loosened"] = _bounded(facts.loosened)
    return notes


def turn_notes(delivered: Delivered) -> dict[str, Any]:
    """What is odd about one turn; empty when nothing is."""
    notes: dict[str, Any] = {}
    if delivered.incomplete_calls:
        notes["incomplete_tool_calls"] = [asdict(call) for call in delivered.incomplete_calls]
    if delivered.schema_problems:
        notes["schema_problems"] = _bounded(delivered.schema_problems)
    if delivered.warnings:
        notes["warnings"] = list(delivered.warnings)
    return notes


def _bounded(notes: tuple[str, ...]) -> list[str]:
    return [note[:MAX_NOTE_CHARS] for note in notes[:MAX_NOTES]]
