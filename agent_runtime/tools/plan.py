"""A plan the model keeps: a tool to write it, and its exact text for the next window after a compression."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from agent_runtime.runstore import Entry
from agent_runtime.tools.registry import Tool, tool
from agent_runtime.tools.result import ToolResult

PLAN_TOOL: Final = "update_plan"
_MARKS: Final = {"open": " ", "doing": ">", "done": "x"}


class PlanItem(BaseModel):
    """One line of a plan."""

    model_config = ConfigDict(extra="forbid")

    text: str = Field(description="What is to be done.", min_length=1)
    state: Literal["open", "doing", "done"] = Field(description="How far it is.")


class Plan:
    """The plan of one session. Give `tool()` to the registry and `attachments` to `AgentOptions`."""

    def __init__(self) -> None:
        self._items: list[PlanItem] = []

    def tool(self) -> Tool:
        """The tool that replaces the plan."""

        async def update_plan(
            items: Annotated[list[PlanItem], Field(description="The whole plan, in order.")],
        ) -> ToolResult:
            """Write down the plan for a task of several steps, and again whenever it changes."""
            self._items = items
            return ToolResult(f"Plan of {len(items)} items, open: {sum(item.state != 'done' for item in items)}.")

        return tool(name=PLAN_TOOL, parallel=False)(update_plan)

    def text(self) -> str:
        """The plan as the model reads it; "" when there is none."""
        lines = [f"{n}. [{_MARKS[item.state]}] {item.text}" for n, item in enumerate(self._items, start=1)]
        return "\n".join(["[Your plan as it stands:]", *lines]) if lines else ""

    def attachments(self) -> Sequence[str]:
        """What goes behind a summary: the plan while anything of it is open."""
        return [self.text()] if any(item.state != "done" for item in self._items) else []

    def restore(self, entries: Sequence[Entry]) -> None:
        """Take the plan that a run log ends with, for a session that is resumed."""
        written: dict[str, str] = {}
        for entry in entries:
            if entry["kind"] == "message":
                calls = entry["message"].get("tool_calls", ())
                written |= {c["id"]: c["function"]["arguments"] for c in calls if c["function"]["name"] == PLAN_TOOL}
            elif entry["kind"] == "result" and entry["call"] in written and entry["result"]["failure"] is None:
                items = json.loads(written[entry["call"]])["items"]
                self._items = [PlanItem.model_validate(item) for item in items]
