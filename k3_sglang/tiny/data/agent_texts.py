"""The fixed texts of the agent: its system text, its tools' declarations, and the words of a compression."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class AgentTexts:
    """What every session of the coding agent begins with, and what is said when it is compressed."""

    system: str
    tools: Sequence[Mapping[str, Any]]
    """Declarations of the file tools and the shell, in the order in which they are sent."""
    summary_instruction: str
    summary_head: str


@cache
def agent_texts() -> AgentTexts:
    """Read them. They are copies, so that this package needs no agent; tests compare them with the agent's own."""
    text = files("k3_sglang.tiny.data").joinpath("agent_texts.json").read_text(encoding="utf-8")
    return AgentTexts(**json.loads(text))
