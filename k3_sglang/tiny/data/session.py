"""A project with the conversation about it, and the agent's calls in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3_sglang.tiny.data.agent_texts import agent_texts
from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.data.project import Project, workspace
from k3_sglang.tiny.data.sample import Call, Talk
from k3_sglang.tiny.data.workspace import TEST_COMMAND, Workspace


@dataclass(slots=True)
class Session:
    """A project with the conversation about it."""

    draw: Draw
    project: Project
    space: Workspace
    talk: Talk

    def run_tests(self, think: str) -> None:
        """Call the test command."""
        result = self.space.run_tests(self.draw.pick(("0.000", "0.000", "0.001")))
        self.talk.call(Call("run_command", {"command": TEST_COMMAND}, result), think=think)

    def read(self, *paths: str, think: str, weight: float = 1.0) -> None:
        """Read files side by side."""
        calls = [Call("read_file", {"path": path}, self.space.read_file(path)) for path in paths]
        self.talk.call(*calls, think=think, weight=weight)

    def replace(self, old: str, new: str, think: str, weight: float = 1.0) -> None:
        """Edit the module."""
        path = self.project.source_file
        arguments = {"path": path, "old": old, "new": new}
        self.talk.call(
            Call("replace_in_file", arguments, self.space.replace_in_file(path, old, new)), think=think, weight=weight
        )


def begin(draw: Draw, made: Project, skill: str = "coding", whole: float = 0.125) -> Session:
    """A session of the agent. A share ``whole`` begins with all that the real one begins with; the others with less.

    Text and declarations are the same every time, so that a few sessions teach them; every token of them is computed
    again in each.
    """
    texts = agent_texts()
    whole_head = draw.chance(whole)
    tools = texts.tools if whole_head else _shortened(draw, texts.tools)
    system = texts.system if whole_head or draw.chance(0.4) else None
    return Session(draw, made, workspace(draw, made), Talk(skill, tools, system))


def _shortened(draw: Draw, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Some of the tools with their required parameters only, described shortly or not at all."""
    described = draw.chance(0.3)
    needed = {"list_files", "read_file", "replace_in_file", "run_command"}
    chosen = [tool["function"] for tool in tools if tool["function"]["name"] in needed or draw.chance(0.2)]
    short: list[dict[str, Any]] = []
    for function in chosen:
        required = function["parameters"].get("required", [])
        kept = {key: {"type": function["parameters"]["properties"][key]["type"]} for key in required}
        parameters = {"type": "object", "properties": kept, "required": required}
        declared: dict[str, Any] = {"name": function["name"], "parameters": parameters}
        if described:
            declared["description"] = function["description"].split(". ")[0].split(":")[0]
        short.append({"type": "function", "function": declared})
    return short
